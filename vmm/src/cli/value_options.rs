//! Which values of calls are shown.

use clap::Args;

/// What a trace shows of calls beside them.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct ValueOptions {
    /// Show the arguments of each call, with names and types where the kernel describes its types, as the
    /// registers that hold them where not
    #[arg(long)]
    pub args: bool,

    /// Show what each call returns, errors by their names; for the tracer graph
    #[arg(long)]
    pub ret: bool,
}

impl ValueOptions {
    /// Whether nothing is asked for.
    pub fn is_unused(self) -> bool {
        !self.args && !self.ret
    }
}
