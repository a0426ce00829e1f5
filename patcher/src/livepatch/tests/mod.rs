//! Payloads made by compilers, linked and looked at.

mod compiler;
mod edges;
mod guests;
mod native;
mod oracle;
