//! A flame graph: which calls, made from where, took how much of the time, as a picture.

use std::fs::File;
use std::io::{self, BufWriter, Seek, Write};
use std::path::Path;

use anyhow::Result;
use inferno::flamegraph::{self, Options};
use rustc_hash::FxHashMap;

use super::create;
use super::nesting::{Closed, Nesting};

/// Stacks, and names of tasks, that are told apart at most: the time of others is shown as one.
const MAX_STACKS: usize = 1 << 17;
const MAX_NAMES: usize = 1 << 14;

/// The number of what has no name.
const NO_NAME: u32 = u32::MAX;

/// What stacks took themselves, and the file that is to show it.
#[derive(Debug)]
pub struct Flame {
    file: File,
    name: String,
    title: String,
    names: Vec<Box<str>>,
    by_name: FxHashMap<Box<str>, u32>,
    /// Nanoseconds by stack: the task's name first, by its number, and then the functions.
    stacks: FxHashMap<Box<[u32]>, u64>,
    /// Of all other stacks together.
    others_ns: u64,
    stack: Vec<u32>,
}

impl Flame {
    /// Opens the file, which is emptied when the picture is drawn, and refuses to write over any of
    /// `inputs`.
    ///
    /// # Errors
    /// It can't be written, or is one of `inputs`.
    pub fn open(path: &Path, inputs: &[&Path]) -> Result<Self> {
        let (file, name) = (create(path, inputs)?, path.display().to_string());
        Ok(Self {
            file,
            name,
            title: String::new(),
            names: Vec::new(),
            by_name: FxHashMap::default(),
            stacks: FxHashMap::default(),
            others_ns: 0,
            stack: Vec::new(),
        })
    }

    /// Takes what is written above the picture: the kernel's release.
    pub fn begin(&mut self, release: &str) {
        self.title = format!("Linux {release}: time in traced functions");
    }

    /// Adds a call of a task with that name. One whose beginning was lost took nobody knows how much itself.
    pub fn add(&mut self, task: Option<&str>, closed: &Closed<'_>) {
        let Some(self_ns) = closed.self_ns else { return };
        let task = task.map_or(NO_NAME, |task| self.number(task));
        self.stack.clear();
        self.stack.push(task);
        self.stack.extend_from_slice(closed.path);
        if let Some(time) = self.stacks.get_mut(&self.stack[..]) {
            *time = time.saturating_add(self_ns);
        } else if self.stacks.len() < MAX_STACKS {
            self.stacks.insert(self.stack.clone().into(), self_ns);
        } else {
            self.others_ns = self.others_ns.saturating_add(self_ns);
        }
    }

    fn number(&mut self, task: &str) -> u32 {
        if let Some(number) = self.by_name.get(task) {
            return *number;
        }
        if self.names.len() >= MAX_NAMES {
            return NO_NAME;
        }
        let number = self.names.len() as u32;
        // What stands between frames can't be in a name.
        self.names.push(task.replace(';', ":").into());
        self.by_name.insert(task.into(), number);
        number
    }

    /// The stacks, folded: a line each, as flame graphs are made of.
    fn folded(&self, functions: &Nesting) -> Vec<String> {
        let line = |stack: &[u32], time: u64| {
            let (task, path) = stack.split_first()?;
            let mut line = match self.names.get(*task as usize) {
                Some(task) => task.to_string(),
                None => "[unknown]".to_owned(),
            };
            for function in path {
                line.push(';');
                line.push_str(functions.text(*function));
            }
            (time > 0).then(|| format!("{line} {time}"))
        };
        let mut lines: Vec<String> =
            self.stacks.iter().filter_map(|(stack, time)| line(stack, *time)).collect();
        if self.others_ns > 0 {
            lines.push(format!("[other stacks] {}", self.others_ns));
        }
        lines.sort_unstable();
        lines
    }

    /// Draws the picture. Of a trace in which no call has returned there is none, and the file is empty.
    ///
    /// # Errors
    /// What writing says.
    pub fn draw(&mut self, functions: &Nesting) -> io::Result<()> {
        let failed = |error: io::Error| {
            io::Error::new(error.kind(), format!("{} can't be written: {error}", self.name))
        };
        let lines = self.folded(functions);
        if self.file.metadata().map_err(failed)?.is_file() {
            self.file.set_len(0).and_then(|()| self.file.rewind()).map_err(failed)?;
        }
        if lines.is_empty() {
            return Ok(());
        }
        let mut options = Options::default();
        options.title.clone_from(&self.title);
        options.count_name = "ns".to_owned();
        options.name_type = "Function:".to_owned();
        let mut out = BufWriter::new(&self.file);
        flamegraph::from_lines(&mut options, lines.iter().map(String::as_str), &mut out)
            .and_then(|()| out.flush())
            .map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use std::{env, fs, process};

    use super::super::nesting::tests::event;
    use super::*;

    #[test]
    fn a_picture_shows_what_each_stack_took_itself() {
        let path = env::temp_dir().join(format!("vmm-flame-{}.svg", process::id()));
        fs::write(&path, "an earlier picture, which is longer than nothing").unwrap();
        let mut flame = Flame::open(&path, &[]).unwrap();
        assert!(Flame::open(&path, &[&path]).unwrap_err().to_string().contains("is an input"));
        flame.begin("6.1 <test>");
        let mut nesting = Nesting::default();
        flame.draw(&nesting).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "");
        for (task, event) in [
            ("sh", event(1, "a", 0, None)),
            ("a;b", event(2, "b", 0, None)),
            ("sh", event(1, "b", 1, None)),
            ("sh", event(1, "b", 1, Some(30))),
            ("sh", event(1, "a", 0, Some(100))),
            ("a;b", event(2, "b", 0, Some(5))),
            // Of this one the call was lost.
            ("sh", event(1, "c", 0, Some(7))),
            ("sh", event(1, "a", 0, None)),
            ("sh", event(1, "a", 0, Some(1))),
        ] {
            if let Some(closed) = nesting.event(&event) {
                flame.add(Some(task), &closed);
            }
        }
        assert_eq!(flame.folded(&nesting), ["a:b;b 5", "sh;a 71", "sh;a;b 30"]);
        flame.draw(&nesting).unwrap();
        let picture = fs::read_to_string(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert!(
            picture.starts_with("<?xml") && picture.trim_end().ends_with("</svg>"),
            "{picture}"
        );
        let document = roxmltree::Document::parse_with_options(
            &picture,
            roxmltree::ParsingOptions { allow_dtd: true, ..Default::default() },
        );
        let document = document.unwrap();
        let titles: Vec<&str> = document
            .descendants()
            .filter(|node| node.tag_name().name() == "title")
            .filter_map(|node| node.text())
            .collect();
        assert!(titles.contains(&"b (30 ns, 28.30%)"), "{titles:?}");
        assert!(titles.contains(&"a (101 ns, 95.28%)"), "{titles:?}");
        assert!(titles.contains(&"all (106 ns, 100%)"), "{titles:?}");
        assert!(picture.contains("Linux 6.1 &lt;test&gt;: time in traced functions"));
    }

    #[test]
    fn stacks_beyond_those_that_are_kept_are_one() {
        let path = env::temp_dir().join(format!("vmm-stacks-{}.svg", process::id()));
        let mut flame = Flame::open(&path, &[]).unwrap();
        fs::remove_file(&path).unwrap();
        for function in 0..MAX_STACKS as u32 + 3 {
            let path = [function];
            flame.add(None, &Closed { path: &path, total_ns: 9, self_ns: Some(2) });
        }
        assert_eq!((flame.stacks.len(), flame.others_ns), (MAX_STACKS, 6));
        let lines = flame.folded(&Nesting::default());
        assert_eq!(lines[0], "[other stacks] 6");
    }
}
