//! The `elmur` program: the command line of this crate with the built-in environments.

use std::process::ExitCode;

fn main() -> ExitCode {
    elmur_cli::main(elmur_envs::Registry::builtin())
}
