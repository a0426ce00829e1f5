//! From what was found to what it means: pure functions, so that hosts can be tested that are not
//! at hand.

use std::fmt::Write;

use serde::Serialize;

use super::findings::{Findings, Kvm, Qemu, QemuState, Virtualisation};

/// The QEMU that the nested lab needs at least. The multi-threaded TCG of older ones goes on running
/// kernel text that the guest has changed, and hangs guests that switch their tracers or static keys.
const LAB_QEMU: (u32, u32) = (8, 1);

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
    /// `vmm run` boots stock distribution kernels.
    run_stock_kernels: bool,
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

    /// Whether `vmm run` boots stock kernels here.
    pub fn can_run_stock_kernels(&self) -> bool {
        self.can.run_stock_kernels
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
        let usable = findings.architecture == "x86_64";
        let (run_bare_guests, run_stock_kernels) = match &findings.kvm {
            Kvm::Present { virtualisation, lacking, .. } if lacking.is_empty() => (
                usable,
                usable && matches!(virtualisation, Virtualisation::Vmx | Virtualisation::Svm),
            ),
            _ => (false, false),
        };
        let nested_lab = findings.qemu.iter().any(|qemu| {
            qemu.architecture == "x86_64"
                && matches!(qemu.state, QemuState::Present { version, tcg: true, .. } if version >= LAB_QEMU)
        });
        Self { run_stock_kernels, run_bare_guests, nested_lab }
    }
}

fn summary(can: Abilities) -> String {
    match can {
        Abilities { run_stock_kernels: true, .. } => {
            "This host runs stock kernels: `vmm run --kernel /boot/vmlinuz --trace func` works."
        }
        Abilities { nested_lab: true, .. } => {
            "This host's KVM can't run stock kernels, but its QEMU can emulate a machine that does: \
             use the nested lab, as `make demo` does."
        }
        Abilities { run_bare_guests: true, .. } => {
            "This host's KVM runs only small test guests; for stock kernels, install QEMU for the \
             nested lab or use a machine with VT-x or AMD-V."
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

fn kvm(kvm: &Kvm) -> Vec<Check> {
    let device = |verdict, found: String, advice: Option<String>| Check {
        id: "kvm.device",
        title: "/dev/kvm".into(),
        verdict,
        found,
        advice,
    };
    match kvm {
        Kvm::Missing => vec![device(
            Verdict::No,
            "missing".into(),
            Some(
                "load the module kvm_intel or kvm_amd; if that fails, switch virtualisation on in \
                 the firmware, or nested virtualisation if this is a virtual machine"
                    .into(),
            ),
        )],
        Kvm::NotPermitted => vec![device(
            Verdict::No,
            "this user may not open it".into(),
            Some(
                "join the device's group (usually `usermod -aG kvm $USER`) and log in again".into(),
            ),
        )],
        Kvm::Unusable(reason) => vec![device(
            Verdict::No,
            reason.clone(),
            Some("make sure that /dev/kvm is the kernel's KVM device".into()),
        )],
        Kvm::Present { virtualisation, api, lacking } => vec![
            device(Verdict::Ok, format!("can be opened, API version {api}"), None),
            kind(virtualisation),
            capabilities(lacking),
        ],
    }
}

fn kind(virtualisation: &Virtualisation) -> Check {
    let (verdict, found, advice) = match virtualisation {
        Virtualisation::Vmx => (Verdict::Ok, "hardware, VT-x (vmx)".into(), None),
        Virtualisation::Svm => (Verdict::Ok, "hardware, AMD-V (svm)".into(), None),
        Virtualisation::Emulated(why) => (
            Verdict::No,
            format!("emulates guest kernels instead of running them: {why}"),
            Some("use a machine with VT-x or AMD-V for stock kernels, or the nested lab".into()),
        ),
    };
    Check { id: "kvm.kind", title: "KVM's kind".into(), verdict, found, advice }
}

fn capabilities(lacking: &[String]) -> Check {
    let all = lacking.is_empty();
    Check {
        id: "kvm.capabilities",
        title: "KVM's capabilities".into(),
        verdict: if all { Verdict::Ok } else { Verdict::No },
        found: if all {
            "all that are needed".into()
        } else {
            format!("without {}", lacking.join(", "))
        },
        advice: (!all).then(|| "use a newer host kernel".into()),
    }
}

fn qemu_check(qemu: &Qemu, can: Abilities) -> Check {
    // Only the nested lab needs QEMU so far, and only where KVM is of no use.
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
        QemuState::Present { version, spelled, tcg: true }
            if qemu.architecture == "x86_64" && *version < LAB_QEMU =>
        {
            let (major, minor) = LAB_QEMU;
            (
                lacking,
                format!("{spelled}, with TCG, too old for the nested lab"),
                Some(format!("install version {major}.{minor} or newer")),
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
            kvm: Kvm::Present { virtualisation: Virtualisation::Vmx, api: 12, lacking: vec![] },
            qemu: ["x86_64", "s390x", "aarch64"].map(qemu).into(),
        }
    }

    fn with_kvm(kvm: Kvm) -> Findings {
        Findings { kvm, ..good() }
    }

    fn emulating() -> Kvm {
        Kvm::Present {
            virtualisation: Virtualisation::Emulated("it is PVM".into()),
            api: 12,
            lacking: vec![],
        }
    }

    fn verdict(report: &Report, id: &str) -> Verdict {
        report.checks.iter().find(|check| check.id == id).expect("a check of that id").verdict
    }

    #[test]
    fn a_good_host_is_described_line_by_line() {
        let expected = "\
ok    host                x86_64, Linux 6.12.1
ok    clock               the time-stamp counter is invariant
ok    /dev/kvm            can be opened, API version 12
ok    KVM's kind          hardware, VT-x (vmx)
ok    KVM's capabilities  all that are needed
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
            with_kvm(Kvm::Missing),
            with_kvm(Kvm::NotPermitted),
            with_kvm(Kvm::Unusable("it is a regular file".into())),
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
        for virtualisation in [Virtualisation::Vmx, Virtualisation::Svm] {
            let kvm = Kvm::Present { virtualisation, api: 12, lacking: vec![] };
            assert!(Report::new(&with_kvm(kvm)).can_run_stock_kernels());
        }
    }

    #[test]
    fn a_kvm_that_emulates_is_good_for_bare_guests_only() {
        let report = Report::new(&with_kvm(emulating()));
        let can = Abilities { run_stock_kernels: false, run_bare_guests: true, nested_lab: true };
        assert_eq!(report.can, can);
        assert_eq!(verdict(&report, "kvm.kind"), Verdict::No);
        assert!(report.human().contains("it is PVM"));
        assert!(report.summary.contains("nested lab"));
    }

    #[test]
    fn a_kvm_without_a_needed_capability_runs_nothing() {
        let lacking = vec!["READONLY_MEM".to_string(), "IRQFD".to_string()];
        let kvm = Kvm::Present { virtualisation: Virtualisation::Svm, api: 12, lacking };
        let report = Report::new(&with_kvm(kvm));
        assert!(!report.can.run_stock_kernels && !report.can.run_bare_guests);
        assert!(report.human().contains("without READONLY_MEM, IRQFD"));
    }

    #[test]
    fn an_old_qemu_matters_only_where_the_lab_is_needed() {
        let state = QemuState::Present { version: (7, 2), spelled: "7.2.22".into(), tcg: true };
        let qemu = vec![Qemu { architecture: "x86_64", state }];
        let report = Report::new(&Findings { qemu: qemu.clone(), ..good() });
        assert_eq!(verdict(&report, "qemu.x86_64"), Verdict::Warn);
        let report = Report::new(&Findings { qemu, kvm: Kvm::Missing, ..good() });
        assert_eq!(verdict(&report, "qemu.x86_64"), Verdict::No);
        assert!(!report.can.nested_lab);
        assert!(report.summary.starts_with("Nothing can be run"));
    }

    #[test]
    fn the_json_form_says_the_same() {
        let json = Report::new(&with_kvm(Kvm::NotPermitted)).json();
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["can"]["run_stock_kernels"], false);
        assert_eq!(value["can"]["nested_lab"], true);
        let device = &value["checks"][2];
        assert_eq!((&device["id"], &device["verdict"]), (&"kvm.device".into(), &"no".into()));
        assert!(device["advice"].as_str().unwrap().contains("group"));
        assert_eq!(value["checks"][0].get("advice"), None);
    }
}
