//! How a guest is made known to other terminals.

use std::sync::mpsc::Receiver;

use anyhow::{Context, Result};
use vmm::control::{Claim, Command, Name, Place, Server};

use super::say;
use super::watch::Identity;

/// A guest that other terminals can reach, unless they can't.
pub struct Serving {
    /// Listens until it is dropped.
    pub server: Option<Server>,
    /// What they ask of whoever watches the guest.
    pub commands: Option<Receiver<Command>>,
    /// Who it is to them.
    pub identity: Identity,
}

/// Takes a name for the guest. One that was not asked for is no reason to fail.
///
/// # Errors
/// The name can't be had.
pub fn claim(name: Option<&Name>) -> Result<Option<Claim>> {
    match Place::of_this_user().claim(name) {
        Ok(claim) => Ok(Some(claim)),
        Err(error) if name.is_some() => Err(error.into()),
        Err(error) => {
            say(format!("other terminals can't reach this guest: {error}"));
            Ok(None)
        }
    }
}

/// Begins to listen for those who want to know of the guest, which `engine` runs.
///
/// # Errors
/// The host refuses.
pub fn serve(claim: Option<Claim>, engine: &str) -> Result<Serving> {
    let served = claim.map(Server::start).transpose().context("the control socket can't be served");
    let (server, commands) = served?.unzip();
    let name = server.as_ref().map(|server| server.name().to_string()).unwrap_or_default();
    Ok(Serving { server, commands, identity: Identity { name, engine: engine.to_owned() } })
}
