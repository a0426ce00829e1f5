//! In whose name and in the middle of what a call was made.

/// The task that made a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Task<'a> {
    /// The thread's number, as in the column `PID` of tracefs; 0 for idle tasks.
    pub pid: u32,
    /// Its name, with `?` in the place of each byte that is not printable ASCII; `None` if it was
    /// never learnt.
    pub comm: Option<&'a str>,
}

impl Task<'_> {
    /// Its name as tracefs shows it: `<idle>` for idle tasks, and `<...>` where it is not known.
    #[must_use]
    pub fn shown(&self) -> &str {
        match self.pid {
            0 => "<idle>",
            _ => self.comm.unwrap_or(UNKNOWN),
        }
    }
}

/// The bits that only wide counts have for interrupts.
pub(super) const WIDE_INTERRUPTS: u32 = 0x1f00_0000;

/// What tracefs shows in the place of a task's name that it does not know.
pub(super) const UNKNOWN: &str = "<...>";

/// What a CPU was in the middle of when a function was called, as the flags that the kernel's own
/// ftrace records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Context {
    /// Interrupts were off.
    pub irqs_off: bool,
    /// Bottom halves were off.
    pub bottom_halves_off: bool,
    /// The task was to leave the CPU as soon as it could be preempted.
    pub need_resched: bool,
    /// It served an interrupt.
    pub hardirq: bool,
    /// It served a soft interrupt.
    pub softirq: bool,
    /// It served an interrupt that can't be masked.
    pub nmi: bool,
    /// How often preemption had been disabled; 255 stands for no less than that.
    pub preempt_depth: u8,
}

impl Context {
    /// What the kernel's count (include/linux/preempt.h) tells: 8 bits that count how often preemption
    /// was disabled, 8 for soft interrupts, the lowest of which says that one is served and the others how
    /// often they were disabled. Then 4 for interrupts and 4 for those that can't be masked; or with
    /// `is_wide`, as seen in 7.3, 8 that count how often interrupts were disabled, and those
    /// ([`WIDE_INTERRUPTS`]).
    pub(super) fn of_count(count: u32, is_wide: bool) -> Self {
        let [hardirq, nmi] =
            if is_wide { [0x0f00_0000, 0x1000_0000] } else { [0x000f_0000, 0x00f0_0000] };
        Self {
            softirq: count & 0x100 != 0,
            bottom_halves_off: count & 0xfe00 != 0,
            hardirq: count & hardirq != 0,
            nmi: count & nmi != 0,
            preempt_depth: count as u8,
            ..Self::default()
        }
    }

    /// What tracefs shows in the five columns of the option `irq-info`, but for the last, which is
    /// about migration and is not recorded.
    #[must_use]
    pub fn letters(&self) -> [u8; 5] {
        let irqs = match (self.irqs_off, self.bottom_halves_off) {
            (true, true) => b'D',
            (true, false) => b'd',
            (false, true) => b'b',
            (false, false) => b'.',
        };
        let interrupt = match (self.nmi, self.hardirq, self.softirq) {
            (true, true, _) => b'Z',
            (true, false, _) => b'z',
            (false, true, true) => b'H',
            (false, true, false) => b'h',
            (false, false, true) => b's',
            (false, false, false) => b'.',
        };
        let depth = b".123456789abcdef"[usize::from(self.preempt_depth.min(15))];
        [irqs, if self.need_resched { b'N' } else { b'.' }, interrupt, depth, b'.']
    }

    /// What [`Context::flags`] tells, with a depth of preemption.
    #[must_use]
    pub fn of_flags(flags: u8, preempt_depth: u8) -> Self {
        Self {
            irqs_off: flags & 0x01 != 0,
            need_resched: flags & 0x24 != 0,
            hardirq: flags & 0x08 != 0,
            softirq: flags & 0x10 != 0,
            nmi: flags & 0x40 != 0,
            bottom_halves_off: flags & 0x80 != 0,
            preempt_depth,
        }
    }

    /// The flags as the kernel's records have them in `common_flags` (`TRACE_FLAG_*` in
    /// include/linux/trace_events.h).
    #[must_use]
    pub fn flags(&self) -> u8 {
        let flags = [
            (self.irqs_off, 0x01),
            // Both of the flags by which a kernel marks it, TRACE_FLAG_NEED_RESCHED and
            // TRACE_FLAG_PREEMPT_RESCHED.
            (self.need_resched, 0x24),
            (self.hardirq, 0x08),
            (self.softirq, 0x10),
            (self.nmi, 0x40),
            (self.bottom_halves_off, 0x80),
        ];
        flags.iter().filter(|(set, _)| *set).fold(0, |flags, (_, flag)| flags | flag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_letters_are_those_of_tracefs() {
        let none = Context::default();
        let letters = |context: Context| String::from_utf8(context.letters().to_vec()).unwrap();
        assert_eq!(letters(none), ".....");
        assert_eq!(letters(Context { irqs_off: true, hardirq: true, ..none }), "d.h..");
        assert_eq!(letters(Context { bottom_halves_off: true, ..none }), "b....");
        let both = Context { irqs_off: true, bottom_halves_off: true, ..none };
        assert_eq!(letters(Context { need_resched: true, preempt_depth: 1, ..both }), "DN.1.");
        assert_eq!(letters(Context { softirq: true, preempt_depth: 15, ..none }), "..sf.");
        assert_eq!(letters(Context { softirq: true, hardirq: true, ..none }), "..H..");
        assert_eq!(letters(Context { nmi: true, preempt_depth: 255, ..none }), "..zf.");
        assert_eq!(letters(Context { nmi: true, hardirq: true, softirq: true, ..none }), "..Z..");
    }

    #[test]
    fn the_count_tells_of_preemption_and_interrupts() {
        let none = Context::default();
        for is_wide in [false, true] {
            let told = |count| Context::of_count(count, is_wide);
            assert_eq!(told(0x8000_0000), none);
            assert_eq!(told(3), Context { preempt_depth: 3, ..none });
            assert_eq!(told(0x100), Context { softirq: true, ..none });
            assert_eq!(told(0x200), Context { bottom_halves_off: true, ..none });
            assert_eq!(told(0x1_0000), Context { hardirq: !is_wide, ..none });
            assert_eq!(told(0x10_0000), Context { nmi: !is_wide, ..none });
            assert_eq!(told(0x100_0000), Context { hardirq: is_wide, ..none });
            assert_eq!(told(0x1000_0000), Context { nmi: is_wide, ..none });
        }
    }

    #[test]
    fn the_flags_are_those_of_the_kernels_records() {
        let none = Context::default();
        assert_eq!(none.flags(), 0);
        let context = Context { irqs_off: true, hardirq: true, need_resched: true, ..none };
        assert_eq!(context.flags(), 0x01 | 0x08 | 0x24);
        let context = Context { bottom_halves_off: true, softirq: true, nmi: true, ..none };
        assert_eq!(context.flags(), 0x80 | 0x10 | 0x40);
        for bit in 0..8 {
            let context = Context::of_flags(1 << bit, 7);
            assert_eq!(Context::of_flags(context.flags(), 7), context);
        }
    }

    #[test]
    fn a_task_is_shown_as_tracefs_shows_it() {
        assert_eq!(Task { pid: 1, comm: Some("init") }.shown(), "init");
        assert_eq!(Task { pid: 0, comm: Some("swapper/1") }.shown(), "<idle>");
        assert_eq!(Task { pid: 7, comm: None }.shown(), "<...>");
        assert_eq!(Task { pid: 0, comm: None }.shown(), "<idle>");
    }
}
