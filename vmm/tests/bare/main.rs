//! Bare guests on this host's KVM, whichever kind it is.

mod ends;
mod serial;
mod stops;
mod toys;
