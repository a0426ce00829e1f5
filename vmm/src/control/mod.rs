//! The control socket: a guest's process answers other programs of the same user.
//!
//! Each guest's process listens on a Unix socket named after the guest, in a [`Place`] where `vmm ps`
//! finds it. A [`Server`] carries on the conversations, each in a thread of its own, and hands what is
//! asked to whoever watches the guest, as [`Command`]s. A [`Client`] is the other end.
//!
//! `docs/control-protocol.md` says what is spoken.

mod client;
mod connection;
mod names;
mod outbox;
mod place;
pub mod protocol;
mod server;
#[cfg(test)]
mod tests;
mod wire;

pub use client::{Calls, Client, ClientError, Message, Stopper};
pub use names::Names;
pub use outbox::{Fed, Feed, Outbox};
pub use place::{Claim, Found, Name, NameError, Place, PlaceError};
pub use server::{Answer, Command, PatchWanted, Server, SnapshotWanted, TraceWanted, Waiter};
