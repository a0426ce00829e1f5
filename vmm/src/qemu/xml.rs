//! As much of gdb's target descriptions as is needed: registers and files to include.

/// A register as a target description has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Register {
    pub name: String,
    pub number: u64,
    pub bits: u64,
}

/// The registers of a target description. Files are to be read in the order of their inclusion, as
/// registers are numbered on from one to the next.
#[derive(Debug, Default)]
pub(super) struct Registers {
    pub list: Vec<Register>,
    next: u64,
}

impl Registers {
    /// Adds the registers of one file and gives the names of those that it includes.
    pub(super) fn read(&mut self, text: &str) -> Vec<String> {
        let mut includes = Vec::new();
        for tag in tags(text) {
            let name = tag.split_ascii_whitespace().next().unwrap_or_default();
            match name {
                "xi:include" => includes.extend(attribute(tag, "href").map(str::to_owned)),
                "reg" => self.add(tag),
                _ => {}
            }
        }
        includes
    }

    fn add(&mut self, tag: &str) {
        let number = |name| attribute(tag, name)?.parse::<u64>().ok();
        let this = number("regnum").unwrap_or(self.next);
        self.next = this.saturating_add(1);
        if let (Some(name), Some(bits)) = (attribute(tag, "name"), number("bitsize")) {
            self.list.push(Register { name: name.to_owned(), number: this, bits });
        }
    }
}

/// What stands between `<` and `>`, without comments and declarations.
fn tags(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        loop {
            rest = &rest[rest.find('<')?..];
            if let Some(comment) = rest.strip_prefix("<!--") {
                rest = &comment[comment.find("-->")?..];
                continue;
            }
            let end = rest.find('>')?;
            let tag = &rest[1..end];
            rest = &rest[end..];
            return Some(tag.trim_end_matches('/'));
        }
    })
}

/// The value of an attribute of a tag.
fn attribute<'t>(tag: &'t str, name: &str) -> Option<&'t str> {
    let mut rest = tag;
    loop {
        let (before, after) = rest.split_once('=')?;
        let after = after.trim_start();
        let quote = after.chars().next().filter(|quote| matches!(quote, '"' | '\''))?;
        let (value, behind) = after[1..].split_once(quote)?;
        if before.split_ascii_whitespace().next_back() == Some(name) {
            return Some(value);
        }
        rest = behind;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_numbered_on_unless_they_have_a_number() {
        let mut registers = Registers::default();
        let includes = registers.read(
            "<?xml version=\"1.0\"?><!DOCTYPE target SYSTEM \"gdb-target.dtd\">\n<target>\
             <!-- <reg name=\"not\" bitsize=\"1\"/> --><xi:include href='core.xml'/></target>",
        );
        assert_eq!(includes, ["core.xml"]);
        let core = "<feature name=\"f\"><reg name=\"rax\" bitsize=\"64\" type=\"int64\"/>\
                    <reg name = \"rip\" bitsize = \"64\"/>\
                    <reg name=\"cr0\" bitsize=\"64\" regnum=\"40\"/><reg bitsize=\"8\"/>\
                    <reg name=\"cr2\" bitsize=\"32\"/></feature>";
        assert!(registers.read(core).is_empty());
        let found: Vec<_> =
            registers.list.iter().map(|r| (r.name.as_str(), r.number, r.bits)).collect();
        assert_eq!(found, [("rax", 0, 64), ("rip", 1, 64), ("cr0", 40, 64), ("cr2", 42, 32)]);
    }

    #[test]
    fn text_that_breaks_off_is_read_as_far_as_it_goes() {
        let whole = "<a><!-- x --><reg name=\"r\" bitsize=\"8\"/><xi:include href=\"f\"/>";
        for end in 0..whole.len() {
            let mut registers = Registers::default();
            registers.read(&whole[..end]);
            assert!(registers.list.len() <= 1);
        }
    }
}
