//! Payloads made by compilers, linked and looked at.

mod compiler;
mod klp;
mod native;
