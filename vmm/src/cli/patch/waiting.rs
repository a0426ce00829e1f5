//! Waits until a guest is patched: for the guest to be ready, and for whoever is in the way.

use std::sync::Arc;
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use humantime::parse_duration;
use vmm::control::protocol::{MAX_PATCH_TIMEOUT, RefusalKind, Waiting as News};
use vmm::control::{Client, ClientError, Name};

use super::text;
use crate::cli::progress::Progress;
use crate::cli::reach::connect;
use crate::cli::say;
use crate::cli::status::Status;
use crate::signals::{self, EndSignal};

/// How often a guest that is not ready yet is asked again.
const ASK_AGAIN: Duration = Duration::from_millis(200);

/// When somebody who is in the way is named where there is no terminal, and how often at most.
const SAY: Duration = Duration::from_secs(1);

/// The time that something may take, by its option.
///
/// # Errors
/// It is no time, or too long.
pub fn parse_timeout(text: &str) -> Result<Duration, String> {
    let timeout = parse_duration(text).map_err(|error| error.to_string())?;
    match timeout <= MAX_PATCH_TIMEOUT {
        true => Ok(timeout),
        false => Err(format!("at most {} hours", MAX_PATCH_TIMEOUT.as_secs() / 3600)),
    }
}

/// Whether somebody has had enough.
type Stop<'a> = dyn Fn() -> bool + 'a;

/// Shows who is in the way.
type Tell<'a> = dyn FnMut(&News) + 'a;

/// Somebody waits.
pub struct Waiting {
    until: Instant,
    progress: Progress,
    signal: Arc<OnceLock<EndSignal>>,
    said: Said,
}

/// What was said last, and when.
#[derive(Default)]
struct Said {
    sentence: String,
    at: Option<Instant>,
}

impl Said {
    /// Says it if it is new and something was not said just now.
    fn say(&mut self, sentence: &str) {
        if self.sentence != sentence && self.at.is_none_or(|at| at.elapsed() >= SAY) {
            say(sentence);
            *self = Self { sentence: sentence.to_owned(), at: Some(Instant::now()) };
        }
    }
}

impl Waiting {
    /// Begins to wait, for so long at most; signals that ask for an end are taken for that.
    ///
    /// # Errors
    /// Signals can't be handled.
    pub fn new(timeout: Duration) -> Result<Self> {
        let signal = Arc::new(OnceLock::new());
        let on_signal = Arc::clone(&signal);
        signals::on_end_signal(move |signal| {
            // The first one counts.
            let _ = on_signal.set(signal);
        })
        .context("signals can't be handled")?;
        let progress = Progress::new(false);
        Ok(Self { until: Instant::now() + timeout, progress, signal, said: Said::default() })
    }

    /// Asks the guest of that name, again and again while it is not ready. `ask` is given the time that
    /// is left in milliseconds, what tells whether it is still wanted, and what shows who is in the
    /// way. Gives the answer, or the exit status if it was not to be waited for.
    ///
    /// # Errors
    /// The guest can't be reached, or has refused.
    pub fn until_done<T>(
        &mut self,
        name: &Name,
        ask: impl Fn(&mut Client, u64, &Stop<'_>, &mut Tell<'_>) -> Result<T, ClientError>,
    ) -> Result<Result<T, Status>> {
        let mut client = connect(name)?;
        let Self { until, progress, signal, said } = self;
        let stop = || signal.get().is_some();
        let answer = loop {
            let left = until.saturating_duration_since(Instant::now());
            let milliseconds = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
            let mut tell = |news: &News| {
                if progress.is_on() {
                    progress.show(|| text::waiting(news));
                } else if news.waited >= SAY {
                    said.say(&text::in_the_way(news));
                }
            };
            match ask(&mut client, milliseconds, &stop, &mut tell) {
                Err(ClientError::Refused(refusal))
                    if refusal.kind == RefusalKind::NotReady && !left.is_zero() && !stop() =>
                {
                    progress.show(|| refusal.message.clone());
                    thread::sleep(ASK_AGAIN.min(left));
                }
                answer => break answer,
            }
        };
        progress.clear();
        match (answer, signal.get()) {
            (Ok(answer), _) => Ok(Ok(answer)),
            (Err(ClientError::Refused(refusal)), Some(signal))
                if matches!(refusal.kind, RefusalKind::Stopped | RefusalKind::NotReady) =>
            {
                say("it is given up, and nothing was changed");
                Ok(Err(Status::Interrupted(*signal)))
            }
            (Err(ClientError::Refused(refusal)), _) if refusal.kind == RefusalKind::InUse => {
                say(refusal.message);
                Ok(Err(Status::InUse))
            }
            (Err(error), _) => Err(error.into()),
        }
    }
}
