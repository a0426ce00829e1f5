//! The time of day, as people here count it.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::time::{SystemTime, UNIX_EPOCH};

/// Hours, minutes and seconds now, in the local zone.
pub fn time_of_day() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = libc::time_t::try_from(since.as_secs()).unwrap_or(0);
    let mut broken = MaybeUninit::<libc::tm>::zeroed();
    // SAFETY: both pointers are to what lives here, and all bytes zero is a valid `tm`, should the
    // function fail.
    let broken = unsafe {
        libc::localtime_r(&raw const seconds, broken.as_mut_ptr());
        broken.assume_init()
    };
    format!("{:02}:{:02}:{:02}", broken.tm_hour, broken.tm_min, broken.tm_sec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_has_hours_minutes_and_seconds() {
        let now = time_of_day();
        let parts: Vec<u8> = now.split(':').map(|part| part.parse().unwrap()).collect();
        let [hour, minute, second] = parts[..] else { panic!("{now}") };
        assert!(now.len() == 8 && hour < 24 && minute < 60 && second < 61, "{now}");
    }
}
