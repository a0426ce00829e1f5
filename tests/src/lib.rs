//! What the end-to-end tests share.

pub mod guest;
pub mod lab;
