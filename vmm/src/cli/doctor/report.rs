//! From what was found to what it means: pure functions, so that hosts can be tested that are not
//! at hand.

use std::fmt::Write;

use serde::Serialize;

use vmm::kvm::{Extension, KvmKind};

use super::findings::{Findings, Qemu, QemuState};

/// The QEMU that emulated guests need at least. The multi-threaded TCG of older ones goes on running
/// kernel text that the guest has changed, and hangs guests that switch their tracers or static keys.
const TCG_QEMU: (u32, u32) = (8, 1);

/// What this host can do, and what each part of that rests on.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// What can be done here.
    can: Abilities,
    /// The same in a sentence or two, with what to do next.
    summary: String,
    /// What was looked at, one by one.
    checks: Vec<Check>,
}

/// What can be done on a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[allow(clippy::struct_excessive_bools, reason = "independent answers, named in the output")]
pub struct Abilities {
    /// `vmm run` boots stock distribution kernels under KVM.
    run_stock_kernels: bool,
    /// `vmm run` boots stock distribution kernels of this host's architecture under QEMU's emulation.
    emulate_stock_kernels: bool,
    /// `vmm run` boots guests that are made for tests.
    run_bare_guests: bool,
    /// QEMU can emulate a machine with SVM in which `vmm run` boots stock kernels.
    nested_lab: bool,
}

/// One thing that was looked at.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Check {
    /// Names the check to scripts.
    id: &'static str,
    /// Names it to people.
    title: String,
    verdict: Verdict,
    /// What was found.
    found: String,
    /// What to do about it, unless it is well.
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

/// How a check went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// As it should be.
    Ok,
    /// Something is impaired, or something optional is missing.
    Warn,
    /// Something needed is missing.
    No,
}

impl Verdict {
    fn mark(self) -> &'static str {
        match self {
            Verdict::Ok => "ok",
            Verdict::Warn => "warn",
            Verdict::No => "no",
        }
    }
}

impl Report {
    /// Judges what was found.
    pub fn new(findings: &Findings) -> Self {
        let can = Abilities::new(findings);
        let mut checks = vec![host(findings), clock(findings)];
        checks.extend(kvm(&findings.kvm));
        checks.extend(findings.qemu.iter().map(|qemu| qemu_check(qemu, can)));
        Self { can, summary: summary(can), checks }
    }

    /// Whether `vmm run` boots stock kernels here, one way or the other.
    pub fn can_run_stock_kernels(&self) -> bool {
        self.can.run_stock_kernels || self.can.emulate_stock_kernels
    }

    /// The report for people: aligned, a line for each check, then what can be done.
    pub fn human(&self) -> String {
        let width = self.checks.iter().map(|check| check.title.len()).max().unwrap_or_default();
        let mut text = String::new();
        for check in &self.checks {
            let mark = check.verdict.mark();
            // Writing to a String does not fail.
            let _ = writeln!(text, "{mark:<5} {:<width$}  {}", check.title, check.found);
            if let Some(advice) = &check.advice {
                let _ = writeln!(text, "      {:width$}  -> {advice}", "");
            }
        }
        let _ = writeln!(text, "\n{}", self.summary);
        text
    }

    /// The report for programs.
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self).expect("strings and booleans always serialise") + "\n"
    }
}

impl Abilities {
    fn new(findings: &Findings) -> Self {
        let x86 = findings.architecture == "x86_64";
        let hardware = matches!(findings.kvm, KvmKind::Hardware(_));
        let emulating = matches!(findings.kvm, KvmKind::Emulating { .. });
        let (run_stock_kernels, run_bare_guests) =
            (x86 && hardware, x86 && (hardware || emulating));
        let nested_lab = findings.qemu.iter().any(|qemu| {
            qemu.architecture == "x86_64"
                && matches!(qemu.state, QemuState::Present { version, tcg: true, .. } if version >= TCG_QEMU)
        });
        // The same QEMU serves either purpose.
        let emulate_stock_kernels = nested_lab;
        Self { run_stock_kernels, emulate_stock_kernels, run_bare_guests, nested_lab }
    }
}

fn summary(can: Abilities) -> String {
    match can {
        Abilities { run_stock_kernels: true, .. } => {
            "This host runs stock kernels: `vmm run --kernel /boot/vmlinuz --trace func` works."
        }
        Abilities { emulate_stock_kernels: true, .. } => {
            "This host's KVM can't run stock kernels, but its QEMU emulates them: \
             `vmm run --kernel /boot/vmlinuz --trace func` works, slowly."
        }
        Abilities { run_bare_guests: true, .. } => {
            "This host's KVM runs only small test guests; for stock kernels, install QEMU, which \
             emulates them, or use a machine with VT-x or AMD-V."
        }
        _ => "Nothing can be run on this host yet; see what the lines above advise.",
    }
    .to_string()
}

fn host(findings: &Findings) -> Check {
    let ours = findings.architecture == "x86_64";
    Check {
        id: "host",
        title: "host".into(),
        verdict: if ours { Verdict::Ok } else { Verdict::No },
        found: format!("{}, Linux {}", findings.architecture, findings.kernel),
        advice: (!ours)
            .then(|| "use an x86_64 host; KVM guests of others are not supported".into()),
    }
}

fn clock(findings: &Findings) -> Check {
    let (verdict, found, advice) = if findings.invariant_tsc {
        (Verdict::Ok, "the time-stamp counter is invariant", None)
    } else {
        (
            Verdict::Warn,
            "the time-stamp counter may change its rate or stop",
            Some("don't compare a trace's times across CPUs, or use a newer CPU"),
        )
    };
    Check {
        id: "clock",
        title: "clock".into(),
        verdict,
        found: found.into(),
        advice: advice.map(Into::into),
    }
}

fn kvm(kvm: &KvmKind) -> Vec<Check> {
    let check = |id, title: &str, found: Result<String, (String, &str)>| {
        let (verdict, found, advice) = match found {
            Ok(found) => (Verdict::Ok, found, None),
            Err((found, advice)) => (Verdict::No, found, Some(advice.into())),
        };
        Check { id, title: title.into(), verdict, found, advice }
    };
    let device = |found| check("kvm.device", "/dev/kvm", found);
    let kind = |found| check("kvm.kind", "KVM's kind", found);
    let capabilities = |found| check("kvm.capabilities", "KVM's capabilities", found);

    let opens = || device(Ok("can be opened".into()));
    let all = || capabilities(Ok("all that are needed".into()));
    match kvm {
        KvmKind::Missing { .. } => vec![device(Err((
            "missing".into(),
            "load the module kvm_intel or kvm_amd; if that fails, switch virtualisation on in the \
             firmware, or nested virtualisation if this is a virtual machine",
        )))],
        KvmKind::NotPermitted { .. } => vec![device(Err((
            "this user may not open it".into(),
            "join the group that owns it (usually `usermod -aG kvm $USER`) and log in again",
        )))],
        KvmKind::NotKvm { found, .. } => {
            vec![device(Err((format!("not KVM: {found}"), "see what has taken its place")))]
        }
        KvmKind::Lacking { capability } => vec![
            opens(),
            capabilities(Err((format!("without {capability}"), "use a newer host kernel"))),
        ],
        KvmKind::Emulating { reason } => vec![
            opens(),
            all(),
            kind(Err((
                format!("emulates guest kernels instead of running them: {reason}"),
                "use a machine with VT-x or AMD-V for stock kernels, or QEMU's emulation (--accel tcg)",
            ))),
        ],
        KvmKind::Hardware(extension) => {
            let name = match extension {
                Extension::Vmx => "Intel's VT-x (vmx)",
                Extension::Svm => "AMD-V (svm)",
            };
            vec![opens(), all(), kind(Ok(format!("hardware, {name}")))]
        }
        other => vec![kind(Err((other.to_string(), "see the user guide")))],
    }
}

fn qemu_check(qemu: &Qemu, can: Abilities) -> Check {
    // Guests of this host's architecture need QEMU only where KVM is of no use; the others are
    // somebody's wish.
    let wanted = qemu.architecture == "x86_64" && !can.run_stock_kernels;
    let lacking = if wanted { Verdict::No } else { Verdict::Warn };
    let install = format!("install the package that has qemu-system-{}", qemu.architecture);
    let (verdict, found, advice) = match &qemu.state {
        QemuState::Missing => (lacking, "missing".into(), Some(install)),
        QemuState::Broken(reason) => (lacking, reason.clone(), Some(format!("re{install}"))),
        QemuState::Present { spelled, tcg: false, .. } => (
            lacking,
            format!("{spelled}, without TCG"),
            Some(format!("{install} with TCG; guests can't be emulated without it")),
        ),
        QemuState::Present { version, spelled, tcg: true } if *version < TCG_QEMU => {
            let (major, minor) = TCG_QEMU;
            (
                lacking,
                format!("{spelled}, with TCG that loses kernels' changes of their text"),
                Some(format!("install version {major}.{minor} or newer, as from backports")),
            )
        }
        QemuState::Present { spelled, tcg: true, .. } => {
            (Verdict::Ok, format!("{spelled}, with TCG"), None)
        }
    };
    let id = match qemu.architecture {
        "x86_64" => "qemu.x86_64",
        "s390x" => "qemu.s390x",
        _ => "qemu.aarch64",
    };
    Check { id, title: format!("QEMU for {}", qemu.architecture), verdict, found, advice }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host where everything is as it should be.
    fn good() -> Findings {
        let qemu = |architecture| Qemu {
            architecture,
            state: QemuState::Present { version: (10, 0), spelled: "10.0.2".into(), tcg: true },
        };
        Findings {
            architecture: "x86_64".into(),
            kernel: "6.12.1".into(),
            invariant_tsc: true,
            kvm: KvmKind::Hardware(Extension::Vmx),
            qemu: ["x86_64", "s390x", "aarch64"].map(qemu).into(),
        }
    }

    fn with_kvm(kvm: KvmKind) -> Findings {
        Findings { kvm, ..good() }
    }

    fn emulating() -> KvmKind {
        KvmKind::Emulating { reason: "it is PVM".into() }
    }

    fn missing() -> KvmKind {
        KvmKind::Missing { device: "/dev/kvm".into() }
    }

    fn not_permitted() -> KvmKind {
        KvmKind::NotPermitted { device: "/dev/kvm".into() }
    }

    fn verdict(report: &Report, id: &str) -> Verdict {
        report.checks.iter().find(|check| check.id == id).expect("a check of that id").verdict
    }

    #[test]
    fn a_good_host_is_described_line_by_line() {
        let expected = "\
ok    host                x86_64, Linux 6.12.1
ok    clock               the time-stamp counter is invariant
ok    /dev/kvm            can be opened
ok    KVM's capabilities  all that are needed
ok    KVM's kind          hardware, Intel's VT-x (vmx)
ok    QEMU for x86_64     10.0.2, with TCG
ok    QEMU for s390x      10.0.2, with TCG
ok    QEMU for aarch64    10.0.2, with TCG

This host runs stock kernels: `vmm run --kernel /boot/vmlinuz --trace func` works.
";
        assert_eq!(Report::new(&good()).human(), expected);
    }

    #[test]
    fn whatever_is_not_well_comes_with_advice_and_what_is_well_without() {
        let hosts = [
            good(),
            with_kvm(missing()),
            with_kvm(not_permitted()),
            with_kvm(KvmKind::NotKvm { device: "/dev/kvm".into(), found: "a file".into() }),
            with_kvm(KvmKind::Lacking { capability: "KVM_CAP_IRQFD" }),
            with_kvm(emulating()),
            Findings { architecture: "riscv64".into(), invariant_tsc: false, ..good() },
            Findings {
                qemu: [
                    QemuState::Missing,
                    QemuState::Broken("`qemu` failed".into()),
                    QemuState::Present { version: (7, 2), spelled: "7.2".into(), tcg: true },
                    QemuState::Present { version: (9, 0), spelled: "9.0".into(), tcg: false },
                ]
                .map(|state| Qemu { architecture: "x86_64", state })
                .into(),
                ..good()
            },
        ];
        for findings in hosts {
            for check in Report::new(&findings).checks {
                assert_eq!(check.verdict == Verdict::Ok, check.advice.is_none(), "{check:?}");
            }
        }
    }

    #[test]
    fn hardware_of_either_make_runs_stock_kernels() {
        for extension in [Extension::Vmx, Extension::Svm] {
            let kvm = KvmKind::Hardware(extension);
            assert!(Report::new(&with_kvm(kvm)).can_run_stock_kernels());
        }
    }

    #[test]
    fn a_kvm_that_emulates_is_good_for_bare_guests_and_qemu_for_the_others() {
        let report = Report::new(&with_kvm(emulating()));
        let can = Abilities {
            run_stock_kernels: false,
            emulate_stock_kernels: true,
            run_bare_guests: true,
            nested_lab: true,
        };
        assert_eq!(report.can, can);
        assert!(report.can_run_stock_kernels());
        assert_eq!(verdict(&report, "kvm.kind"), Verdict::No);
        assert!(report.human().contains("it is PVM"));
        assert!(report.summary.contains("emulates them"));
    }

    #[test]
    fn a_kvm_without_a_needed_capability_runs_nothing() {
        let report = Report::new(&with_kvm(KvmKind::Lacking { capability: "KVM_CAP_IRQFD" }));
        assert!(!report.can.run_stock_kernels && !report.can.run_bare_guests);
        assert!(report.human().contains("without KVM_CAP_IRQFD"));
    }

    #[test]
    fn an_old_qemu_matters_only_where_kvm_is_of_no_use() {
        let state = QemuState::Present { version: (7, 2), spelled: "7.2.22".into(), tcg: true };
        let qemu = vec![Qemu { architecture: "x86_64", state }];
        let report = Report::new(&Findings { qemu: qemu.clone(), ..good() });
        assert_eq!(verdict(&report, "qemu.x86_64"), Verdict::Warn);
        let report = Report::new(&Findings { qemu, kvm: missing(), ..good() });
        assert_eq!(verdict(&report, "qemu.x86_64"), Verdict::No);
        assert!(!report.can_run_stock_kernels());
        assert!(report.summary.starts_with("Nothing can be run"));
    }

    #[test]
    fn the_json_form_says_the_same() {
        let json = Report::new(&with_kvm(not_permitted())).json();
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["can"]["run_stock_kernels"], false);
        assert_eq!(value["can"]["nested_lab"], true);
        let device = &value["checks"][2];
        assert_eq!((&device["id"], &device["verdict"]), (&"kvm.device".into(), &"no".into()));
        assert!(device["advice"].as_str().unwrap().contains("group"));
        assert_eq!(value["checks"][0].get("advice"), None);
    }
}
