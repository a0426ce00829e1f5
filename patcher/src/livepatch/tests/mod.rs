//! Payloads made by compilers, linked and looked at.

pub(super) mod compiler;
mod native;
