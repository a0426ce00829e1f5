//! What is said about patches: pure functions, from figures to text.

use std::time::Duration;

use vmm::control::protocol::{Function, Patch, Patched, Reverted, Stander, Waiting};

use crate::cli::reach::columns;
use crate::cli::summary::{counted, short};

/// How many functions, or standers, a sentence names.
const NAMED: usize = 3;

/// Digits of a digest that lists show.
const DIGEST: usize = 12;

/// That a payload is applied.
pub fn patched(patched: &Patched) -> String {
    let patch = &patched.patch;
    let names: Vec<&str> =
        patch.functions.iter().take(NAMED).map(|function| function.name.as_str()).collect();
    let more = patched.functions.saturating_sub(names.len());
    let more =
        if more > 0 { format!(" and {}", counted(more as u64, "other")) } else { String::new() };
    let replaced: Vec<String> = patched.replaced.iter().map(ToString::to_string).collect();
    let replaced = match &replaced[..] {
        [] => String::new(),
        [one] => format!("; it takes the place of patch {one}"),
        several => format!("; it takes the place of patches {}", several.join(", ")),
    };
    format!(
        "patch {} is applied: {} of {} replace{} {}{more}; the guest stood for {}{}{replaced}",
        patch.id,
        counted(patched.functions as u64, "function"),
        patch.file,
        if patched.functions == 1 { "s" } else { "" },
        names.join(", "),
        short(patch.stop),
        tried(patched.attempts, patched.waited),
    )
}

/// That a patch is taken back.
pub fn reverted(reverted: &Reverted) -> String {
    let functions = counted(reverted.functions as u64, "function");
    let foreign = match reverted.foreign {
        0 => String::new(),
        count => format!(
            "; {} that the guest has changed meanwhile, and left alone",
            counted(count as u64, "function")
        ),
    };
    let stood = match reverted.stop {
        Duration::ZERO => "nothing had to be written".to_owned(),
        stop => format!("the guest stood for {}", short(stop)),
    };
    format!(
        "patch {} is reverted: {functions} put back; {stood}{}{foreign}",
        reverted.id,
        tried(reverted.attempts, reverted.waited)
    )
}

fn tried(attempts: u64, waited: Duration) -> String {
    match attempts {
        0 | 1 => String::new(),
        attempts => format!(", at attempt {attempts} after {}", short(waited)),
    }
}

/// Who is in the way, while it is tried again.
pub fn waiting(waiting: &Waiting) -> String {
    let seconds = waiting.waited.as_secs();
    format!("waiting ({seconds} s): {}; Ctrl-C gives up", in_the_way(waiting))
}

/// Who is in the way.
pub fn in_the_way(waiting: &Waiting) -> String {
    let named: Vec<String> = waiting.standers.iter().take(NAMED).map(stander).collect();
    let more = waiting.standers.len().saturating_sub(NAMED) + waiting.more;
    let more =
        if more > 0 { format!(" and {}", counted(more as u64, "other")) } else { String::new() };
    format!("{}{more}", named.join(", "))
}

fn stander(stander: &Stander) -> String {
    let Stander { pid, comm, function, vcpu } = stander;
    match vcpu {
        Some(vcpu) if comm.is_empty() => format!("CPU {vcpu} is in {function}"),
        Some(vcpu) => format!("{comm} ({pid}) on CPU {vcpu} is in {function}"),
        None => format!("{comm} ({pid}) sleeps in {function}"),
    }
}

/// Patches and their functions, as columns.
pub fn list(patches: &[Patch]) -> String {
    let head = ["ID", "STATE", "APPLIED", "FILE", "SHA-256", "FUNCTION", "FROM", "TO"];
    let mut rows = vec![head.map(ToOwned::to_owned)];
    for patch in patches {
        let mut first = [
            patch.id.to_string(),
            patch.state.label().to_owned(),
            patch.applied.clone(),
            patch.file.clone(),
            digest(&patch.sha256).to_owned(),
        ];
        for function in &patch.functions {
            let [id, state, applied, file, sha256] = std::mem::take(&mut first);
            let to = replacement(patch.id, function);
            let (name, old) = (function.name.clone(), function.old.to_string());
            rows.push([id, state, applied, file, sha256, name, old, to]);
        }
    }
    columns(&rows)
}

fn replacement(id: u64, function: &Function) -> String {
    match function.in_force {
        Some(other) if other != id => format!("{} (patch {other} is in force)", function.new),
        Some(_) => function.new.to_string(),
        None => format!("{} (the guest has changed it)", function.new),
    }
}

/// A patch as `vmm info` shows it.
pub fn info(patch: &Patch) -> String {
    format!(
        "{}: {} (SHA-256 {}), {}, {}, applied {}, the guest stood for {}",
        patch.id,
        patch.file,
        digest(&patch.sha256),
        counted(patch.sites as u64, "function"),
        patch.state.label(),
        patch.applied,
        short(patch.stop)
    )
}

/// As much of a digest as tells files apart.
fn digest(sha256: &str) -> &str {
    sha256.get(..DIGEST).unwrap_or(sha256)
}

#[cfg(test)]
mod tests {
    use vmm::control::protocol::{Address, PatchState};

    use super::*;

    fn function(name: &str, in_force: u64) -> Function {
        let in_force = Some(in_force).filter(|id| *id > 0);
        let (old, new) = (Address(0xffff_ffff_8100_0000), Address(0xffff_ffff_c010_0000));
        Function { name: name.into(), old, new, in_force }
    }

    fn patch(id: u64, functions: &[(&str, u64)]) -> Patch {
        Patch {
            id,
            file: "fix.o".into(),
            sha256: "0123456789abcdef".repeat(4),
            applied: "2026-11-30T12:00:00Z".into(),
            state: PatchState::InForce,
            sites: functions.len(),
            stop: Duration::from_micros(2_900),
            functions: functions.iter().map(|(name, id)| function(name, *id)).collect(),
        }
    }

    #[test]
    fn an_applied_payload_is_told_of_in_one_sentence() {
        let one = Patched {
            patch: patch(1, &[("vfs_read", 1)]),
            functions: 1,
            replaced: vec![],
            attempts: 1,
            waited: Duration::ZERO,
        };
        assert_eq!(
            super::patched(&one),
            "patch 1 is applied: 1 function of fix.o replaces vfs_read; the guest stood for 2.9 ms"
        );
        let many = Patched {
            patch: patch(4, &[("a", 4), ("b", 4), ("c", 4), ("d", 4)]),
            functions: 5,
            replaced: vec![1, 3],
            attempts: 7,
            waited: Duration::from_millis(2_100),
        };
        assert_eq!(
            super::patched(&many),
            "patch 4 is applied: 5 functions of fix.o replace a, b, c and 2 others; the guest stood \
             for 2.9 ms, at attempt 7 after 2.1 s; it takes the place of patches 1, 3"
        );
    }

    #[test]
    fn a_reverted_patch_is_told_of_in_one_sentence() {
        let mut patch = Reverted {
            id: 2,
            functions: 3,
            foreign: 0,
            stop: Duration::from_micros(700),
            attempts: 1,
            waited: Duration::ZERO,
        };
        assert_eq!(
            reverted(&patch),
            "patch 2 is reverted: 3 functions put back; the guest stood for 700 µs"
        );
        (patch.foreign, patch.stop) = (1, Duration::ZERO);
        assert_eq!(
            reverted(&patch),
            "patch 2 is reverted: 3 functions put back; nothing had to be written; 1 function that \
             the guest has changed meanwhile, and left alone"
        );
    }

    #[test]
    fn who_is_in_the_way_is_named_with_the_function() {
        let stander =
            |pid, vcpu| Stander { pid, comm: "work".into(), function: "pipe_read".into(), vcpu };
        let mut news = Waiting {
            standers: vec![stander(81, None), stander(82, Some(1))],
            more: 0,
            attempts: 3,
            waited: Duration::from_secs(2),
        };
        assert_eq!(
            waiting(&news),
            "waiting (2 s): work (81) sleeps in pipe_read, work (82) on CPU 1 is in pipe_read; \
             Ctrl-C gives up"
        );
        news.standers = (0..5).map(|pid| stander(pid, None)).collect();
        news.more = 10;
        assert!(in_the_way(&news).ends_with("work (2) sleeps in pipe_read and 12 others"));
    }

    #[test]
    fn the_list_has_a_line_for_each_function() {
        let patches = [patch(1, &[("a", 2), ("bb", 0)]), patch(2, &[("a", 2)])];
        assert_eq!(
            list(&patches),
            "\
ID  STATE     APPLIED               FILE   SHA-256       FUNCTION  FROM                TO
1   in force  2026-11-30T12:00:00Z  fix.o  0123456789ab  a         0xffffffff81000000  0xffffffffc0100000 (patch 2 is in force)
                                                         bb        0xffffffff81000000  0xffffffffc0100000 (the guest has changed it)
2   in force  2026-11-30T12:00:00Z  fix.o  0123456789ab  a         0xffffffff81000000  0xffffffffc0100000
"
        );
    }
}
