//! Engines that run guests, and the `vmm` program on top of them.
