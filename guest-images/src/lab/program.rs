//! Which shared libraries a host's program needs.

use std::path::{Path, PathBuf};

use super::LabError;
use crate::command::{CommandError, command, output};

/// The libraries of a program, its loader among them, by the paths at which the program looks for
/// them. A static program has none.
pub(super) fn shared_libraries(program: &Path) -> Result<Vec<PathBuf>, LabError> {
    let failed = |reason: String| LabError::Libraries { path: program.to_owned(), reason };
    match output(command("ldd", [] as [&str; 0]).arg(program)) {
        Ok(listing) => parse(&String::from_utf8_lossy(&listing)).map_err(failed),
        Err(CommandError::Failed { message, .. })
            if message.contains("not a dynamic executable") =>
        {
            Ok(Vec::new())
        }
        Err(error) => Err(failed(error.to_string())),
    }
}

/// Reads lines such as `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)`; or the name of a
/// library that is not to be found.
fn parse(listing: &str) -> Result<Vec<PathBuf>, String> {
    let mut libraries = Vec::new();
    for line in listing.lines().map(str::trim) {
        if line.starts_with("linux-vdso") || line == "statically linked" || line.is_empty() {
            continue;
        }
        if line.ends_with("not found") {
            return Err(line.to_owned());
        }
        let path = line.split_once(" => ").map_or(line, |(_, path)| path);
        let path = path.rsplit_once(" (").map_or(path, |(path, _)| path);
        libraries.push(PathBuf::from(path));
    }
    Ok(libraries)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_and_loader_are_listed_by_path() {
        let listing = "\tlinux-vdso.so.1 (0x00007ffd)\n\
            \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        assert_eq!(
            parse(listing).unwrap(),
            [
                Path::new("/lib/x86_64-linux-gnu/libc.so.6"),
                Path::new("/lib64/ld-linux-x86-64.so.2")
            ]
        );
        assert_eq!(parse("\tstatically linked\n").unwrap(), Vec::<PathBuf>::new());
        assert_eq!(parse("\tlibx.so => not found\n").unwrap_err(), "libx.so => not found");
    }

    #[test]
    fn this_test_needs_the_c_library() {
        let libraries = shared_libraries(&std::env::current_exe().unwrap()).unwrap();
        assert!(libraries.iter().any(|path| path.ends_with("libc.so.6")), "{libraries:?}");
        assert!(libraries.iter().all(|path| path.exists()));
    }
}
