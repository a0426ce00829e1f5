//! Functions of a bare guest that are redirected to others, whatever their pads are like: the guest looks
//! at registers, flags and stack in the function that is called instead, and behind it.

use std::collections::BTreeMap;

use patcher::patch::{Reverted, Site};

use crate::bare::{CALLS, CPUS, Driver};

/// A function whose pad is never written, to which all may be redirected at once.
const PLAIN: &str = "no_pad";

/// Redirects each of the functions `idle`, whose pads may be written, with and without a trace, and all of
/// them at once while the guest is busy with so many rounds. Those that sign
/// their return address in front of the pad are left out.
///
/// # Panics
/// If the guest, or what is recorded, is not as it has to be.
pub fn check(driver: &mut Driver<'_>, idle: &[&str], busy: u64) {
    let idle: Vec<&str> = idle.iter().copied().filter(|name| !driver.signs(name)).collect();
    let untouched = driver.text();
    let calls = |rounds: u64| [rounds * CALLS; CPUS];
    for (index, name) in idle.iter().enumerate() {
        // Its records tell that the other one is called, from its first instruction on.
        let other = idle[(index + 1) % idle.len()];
        let jump = driver.redirected(name, other);
        let traced = driver.redirected_and_traced(name, other);
        let [target] = &driver.sites(&[other])[..] else { panic!("one site was asked for") };
        let target = driver.arm(vec![target.clone()]);

        let applied = driver.arm(vec![jump.clone()]);
        driver.run(1);
        let expected: BTreeMap<_, _> = [(other.to_owned(), calls(2))].into();
        assert_eq!(driver.recorded(), expected, "{name} to {other}");

        // From one form of ours to another.
        let both = Site { original: jump.replacement, ..traced.clone() };
        assert_eq!(driver.arm(vec![both]).already(), 0);
        driver.run(1);
        let expected = [(other.to_owned(), calls(2)), ((*name).to_owned(), calls(1))].into();
        assert_eq!(driver.recorded(), expected, "{name} to {other}, traced");

        let back = Site { original: traced.replacement, replacement: jump.replacement, ..traced };
        assert_eq!(driver.arm(vec![back]).already(), 0);
        driver.disarm(&target);
        driver.run(1);
        assert_eq!(driver.recorded(), BTreeMap::new(), "{name} to {other}");
        assert_eq!(driver.disarm(&applied), Reverted { restored: 1, ..Reverted::default() });
        assert_eq!(driver.text(), untouched, "{name}");
    }

    let jumps: Vec<Site> = idle.iter().map(|name| driver.redirected(name, PLAIN)).collect();
    let traced: Vec<Site> =
        idle.iter().map(|name| driver.redirected_and_traced(name, PLAIN)).collect();
    // Both processors are anywhere at all.
    driver.ask(busy);
    for _ in 0..20 {
        let applied = driver.arm(jumps.clone());
        let between = traced.iter().zip(&jumps);
        let between =
            between.map(|(traced, jump)| Site { original: jump.replacement, ..traced.clone() });
        let both = driver.arm(between.collect());
        driver.check();
        let restored = idle.len();
        assert_eq!(driver.disarm(&both), Reverted { restored, ..Reverted::default() });
        assert_eq!(driver.disarm(&applied), Reverted { restored, ..Reverted::default() });
        driver.check();
    }
    driver.wait();
    driver.forget_recorded();
    let applied = driver.arm(traced);
    driver.run(3);
    driver.disarm(&applied);
    let expected = idle.iter().map(|name| ((*name).to_owned(), calls(3))).collect();
    assert_eq!(driver.recorded(), expected);
    assert_eq!(driver.text(), untouched);
}
