//! Live patches: who stands in the code that is to be replaced.

mod stacks;

pub use stacks::{StackCheck, StackCheckError, StackError, Stander, Watched};
