//! The KVM engine: bare guests on this host's KVM, whichever kind it is; and, in the nested lab,
//! the same guests on KVM as hardware has it, and stock kernels.

mod ends;
mod lab;
mod serial;
mod stock;
mod stops;
mod toys;
