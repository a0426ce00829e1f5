//! Payloads made by compilers, linked and looked at.

pub(super) mod compiler;
mod edges;
mod guests;
mod hostile;
mod instructions;
mod klp;
mod native;
mod oracle;
mod resolving;
mod sections;
