//! Archives in the "newc" form of cpio, which the kernel unpacks as its first file system
//! (Documentation/driver-api/early-userspace/buffer-format.rst).
//!
//! The same calls give the same bytes: times are zero, inode numbers count up.

use std::collections::BTreeSet;

const REGULAR: u32 = 0o100_000;
const DIRECTORY: u32 = 0o040_000;
const SYMLINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// An archive that is being written.
#[derive(Debug, Clone, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    directories: BTreeSet<String>,
}

/// A file does not fit the format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{path} has {len} bytes; a file in an initramfs has less than 4 GiB")]
pub struct FileTooLarge {
    /// The file's path in the archive.
    pub path: String,
    /// Its size in bytes.
    pub len: usize,
}

impl Archive {
    /// An archive with nothing in it.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a regular file, and the directories above it. `path` is absolute in the guest; `mode`
    /// holds permission bits.
    ///
    /// # Errors
    /// [`FileTooLarge`].
    pub fn file(&mut self, path: &str, mode: u32, content: &[u8]) -> Result<(), FileTooLarge> {
        let len = u32::try_from(content.len())
            .map_err(|_| FileTooLarge { path: path.to_owned(), len: content.len() })?;
        self.parents(path);
        self.entry(path, REGULAR | mode, len, (0, 0));
        self.bytes.extend_from_slice(content);
        self.pad();
        Ok(())
    }

    /// Adds a directory, and those above it. One that is there already stays as it is.
    pub fn directory(&mut self, path: &str, mode: u32) {
        self.parents(path);
        if self.directories.insert(relative(path).to_owned()) {
            self.entry(path, DIRECTORY | mode, 0, (0, 0));
        }
    }

    /// Adds a symbolic link.
    pub fn symlink(&mut self, path: &str, target: &str) {
        self.parents(path);
        let len = u32::try_from(target.len()).expect("a link's target is a short path");
        self.entry(path, SYMLINK | 0o777, len, (0, 0));
        self.bytes.extend_from_slice(target.as_bytes());
        self.pad();
    }

    /// Adds a character device.
    pub fn character_device(&mut self, path: &str, mode: u32, major: u32, minor: u32) {
        self.parents(path);
        self.entry(path, CHARACTER_DEVICE | mode, 0, (major, minor));
    }

    /// The finished archive.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, 0, (0, 0));
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self.bytes
    }

    fn parents(&mut self, path: &str) {
        let path = relative(path);
        for (slash, _) in path.match_indices('/') {
            self.directory(&path[..slash], 0o755);
        }
    }

    /// Header and name; a file's or link's content follows.
    fn entry(&mut self, path: &str, mode: u32, len: u32, device: (u32, u32)) {
        let name = relative(path);
        let links = if mode & DIRECTORY == DIRECTORY { 2 } else { 1 };
        self.entries += 1;
        let name_len = u32::try_from(name.len() + 1).expect("a path is shorter than 4 GiB");
        self.bytes.extend_from_slice(b"070701");
        // ino, mode, uid, gid, nlink, mtime, filesize, devmajor, devminor, rdevmajor, rdevminor,
        // namesize, check: eight hexadecimal digits each.
        for field in
            [self.entries, mode, 0, 0, links, 0, len, 0, 0, device.0, device.1, name_len, 0]
        {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
    }

    /// Header with name, and content, each end on a multiple of four bytes.
    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

/// Names in an archive are relative to its root.
fn relative(path: &str) -> &str {
    path.trim_start_matches('/')
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::process::{Command, Stdio};

    use super::*;

    fn example() -> Vec<u8> {
        let mut archive = Archive::new();
        archive.file("/init", 0o755, b"#!/bin/sh\n").unwrap();
        archive.file("/etc/deep/file", 0o640, b"12345").unwrap();
        archive.file("/etc/deep/empty", 0o644, b"").unwrap();
        archive.symlink("/bin/sh", "busybox");
        archive.character_device("/dev/console", 0o600, 5, 1);
        archive.directory("/proc", 0o555);
        archive.finish()
    }

    fn cpio(arguments: &[&str], archive: &[u8]) -> String {
        let mut child = Command::new("cpio")
            .args(arguments)
            .env("TZ", "UTC")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("cpio must be installed: scripts/setup.sh installs it");
        child.stdin.take().unwrap().write_all(archive).unwrap();
        let done = child.wait_with_output().unwrap();
        assert!(done.status.success());
        String::from_utf8(done.stdout).unwrap()
    }

    #[test]
    fn the_real_cpio_lists_what_was_put_in() {
        let listing = cpio(&["-itv", "--numeric-uid-gid", "--quiet"], &example());
        let lines: Vec<String> = listing
            .lines()
            .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
            .collect();
        assert_eq!(
            lines,
            [
                "-rwxr-xr-x 1 0 0 10 Jan 1 1970 init",
                "drwxr-xr-x 2 0 0 0 Jan 1 1970 etc",
                "drwxr-xr-x 2 0 0 0 Jan 1 1970 etc/deep",
                "-rw-r----- 1 0 0 5 Jan 1 1970 etc/deep/file",
                "-rw-r--r-- 1 0 0 0 Jan 1 1970 etc/deep/empty",
                "drwxr-xr-x 2 0 0 0 Jan 1 1970 bin",
                "lrwxrwxrwx 1 0 0 7 Jan 1 1970 bin/sh -> busybox",
                "drwxr-xr-x 2 0 0 0 Jan 1 1970 dev",
                "crw------- 1 0 0 5, 1 Jan 1 1970 dev/console",
                "dr-xr-xr-x 2 0 0 0 Jan 1 1970 proc",
            ]
        );
    }

    #[test]
    fn the_real_cpio_reads_a_files_content_back() {
        assert_eq!(cpio(&["-i", "--to-stdout", "--quiet", "etc/deep/file"], &example()), "12345");
    }

    #[test]
    fn the_same_calls_give_the_same_bytes() {
        assert_eq!(example(), example());
        assert_eq!(example().len() % 512, 0);
    }
}
