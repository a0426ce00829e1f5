//! The KVM engine: bare guests on this host's KVM, whichever kind it is; and, in the nested lab,
//! stock kernels on KVM as hardware has it.

mod bench;
mod ends;
mod lab;
mod serial;
mod stock;
mod stops;
mod toys;
mod traps;
