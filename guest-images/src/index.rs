//! Which kernels a suite serves, from its package index.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

/// A series of kernels, each of which is a regime of its own for whoever reads a guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Series {
    /// 5.10, of Debian 11.
    V5_10,
    /// 6.1, of Debian 12.
    V6_1,
    /// 6.12, of Debian 13.
    V6_12,
    /// 6.18, the first with Rust code in the kernel image.
    V6_18,
    /// 7.x, whichever is served.
    V7,
}

impl Series {
    /// All series, oldest first.
    pub const ALL: [Series; 5] =
        [Series::V5_10, Series::V6_1, Series::V6_12, Series::V6_18, Series::V7];

    /// Whether a kernel release is of this series.
    #[must_use]
    pub fn contains(self, release: &str) -> bool {
        let (numbers, _) = version_key(release);
        match self {
            Series::V5_10 => numbers.starts_with(&[5, 10]),
            Series::V6_1 => numbers.starts_with(&[6, 1]),
            Series::V6_12 => numbers.starts_with(&[6, 12]),
            Series::V6_18 => numbers.starts_with(&[6, 18]),
            Series::V7 => numbers.starts_with(&[7]),
        }
    }
}

impl fmt::Display for Series {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Series::V5_10 => "5.10",
            Series::V6_1 => "6.1",
            Series::V6_12 => "6.12",
            Series::V6_18 => "6.18",
            Series::V7 => "7",
        })
    }
}

/// A word that names no series.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no kernel series {0:?}; the series are 5.10, 6.1, 6.12, 6.18 and 7")]
pub struct UnknownSeries(String);

impl FromStr for Series {
    type Err = UnknownSeries;

    fn from_str(word: &str) -> Result<Self, UnknownSeries> {
        let word = word.strip_suffix(".x").unwrap_or(word);
        Series::ALL
            .into_iter()
            .find(|series| series.to_string() == word)
            .ok_or_else(|| UnknownSeries(word.to_owned()))
    }
}

/// A package at one version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
}

/// A kernel that a suite serves, and the packages that hold it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// As `uname -r` prints it.
    pub(crate) release: String,
    pub(crate) packages: Vec<Package>,
}

/// The kernels of one series and flavour in a package index, the newest first.
///
/// Up to 6.18 `linux-image-R` holds the kernel's image, configuration and modules. From 6.19 on
/// the image is in `linux-binary-R`, the modules in `linux-modules-R`, the configuration in
/// `linux-base-R`, and `linux-image-R` is empty.
pub(crate) fn candidates(index: &str, series: Series, flavour: &str) -> Vec<Candidate> {
    let packages = kernel_packages(index, flavour);
    let named = |name: String| packages.iter().find(|package| package.name == name).cloned();
    let mut found: Vec<Candidate> = packages
        .iter()
        .filter_map(|package| package.name.strip_prefix("linux-image-"))
        .filter(|release| series.contains(release))
        .map(|release| {
            let parts = match named(format!("linux-binary-{release}")) {
                Some(binary) => vec![
                    Some(binary),
                    named(format!("linux-modules-{release}")),
                    named(format!("linux-base-{release}")),
                ],
                None => vec![named(format!("linux-image-{release}"))],
            };
            Candidate {
                release: release.to_owned(),
                packages: parts.into_iter().flatten().collect(),
            }
        })
        .collect();
    found.sort_by(|a, b| compare_releases(&b.release, &a.release));
    found
}

/// The packages `linux-*-FLAVOUR` of an index.
fn kernel_packages(index: &str, flavour: &str) -> Vec<Package> {
    let suffix = format!("-{flavour}");
    let mut packages = Vec::new();
    for stanza in index.split("\n\n") {
        let field = |name: &str| {
            stanza.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
        };
        let Some(name) = field("Package") else { continue };
        if name.starts_with("linux-")
            && name.ends_with(&suffix)
            && let Some(version) = field("Version")
        {
            packages.push(Package { name: name.to_owned(), version: version.to_owned() });
        }
    }
    packages
}

/// The newer of two kernel releases is the greater.
pub(crate) fn compare_releases(a: &str, b: &str) -> Ordering {
    version_key(a).cmp(&version_key(b))
}

/// The numbers of a release up to its flavour, and the release itself to tell equals apart.
fn version_key(release: &str) -> (Vec<u64>, &str) {
    let version = release.find('-').map_or(release, |dash| {
        // Debian's releases up to 6.1 carry their build as a number behind a dash: 6.1.0-57-cloud.
        let build = release[dash + 1..].split('-').next().unwrap_or_default();
        let build_is_number = !build.is_empty() && build.bytes().all(|b| b.is_ascii_digit());
        &release[..if build_is_number { dash + 1 + build.len() } else { dash }]
    });
    let numbers = version
        .split(|c: char| !c.is_ascii_digit())
        .filter_map(|digits| digits.parse().ok())
        .collect();
    (numbers, release)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Stanzas as the archive had them, cut to a few fields.
    const INDEX: &str = include_str!("../testdata/packages");

    fn releases(series: Series) -> Vec<String> {
        candidates(INDEX, series, "cloud-amd64").into_iter().map(|found| found.release).collect()
    }

    #[test]
    fn the_newest_build_of_a_series_comes_first() {
        assert_eq!(releases(Series::V6_1), ["6.1.0-50-cloud-amd64", "6.1.0-47-cloud-amd64"]);
        assert_eq!(
            releases(Series::V6_12),
            [
                "6.12.117+deb13-cloud-amd64",
                "6.12.95+deb12-cloud-amd64",
                "6.12.90+deb12.1-cloud-amd64",
                "6.12.90+deb12-cloud-amd64",
            ]
        );
        assert_eq!(
            releases(Series::V7),
            ["7.3.4+deb13-cloud-amd64", "7.2.12+deb13-cloud-amd64", "7.0.13+deb13-cloud-amd64"]
        );
    }

    #[test]
    fn a_series_that_is_not_served_has_no_candidates() {
        assert!(releases(Series::V5_10).is_empty());
    }

    #[test]
    fn an_old_kernel_is_one_package_and_a_new_one_is_several() {
        let names = |series| -> Vec<String> {
            candidates(INDEX, series, "cloud-amd64")[0]
                .packages
                .iter()
                .map(|package| format!("{}={}", package.name, package.version))
                .collect()
        };
        assert_eq!(names(Series::V6_1), ["linux-image-6.1.0-50-cloud-amd64=6.1.176-1"]);
        assert_eq!(
            names(Series::V7),
            [
                "linux-binary-7.3.4+deb13-cloud-amd64=7.3.4-1~bpo13+1",
                "linux-modules-7.3.4+deb13-cloud-amd64=7.3.4-1~bpo13+1",
                "linux-base-7.3.4+deb13-cloud-amd64=7.3.4-1~bpo13+1",
            ]
        );
    }

    #[test]
    fn debug_and_unsigned_packages_and_other_flavours_are_no_candidates() {
        let all: Vec<String> = Series::ALL.into_iter().flat_map(releases).collect();
        assert!(all.iter().all(|release| release.ends_with("-cloud-amd64")), "{all:?}");
        assert_eq!(
            candidates(INDEX, Series::V6_1, "amd64").len(),
            3,
            "the flavour amd64 is what ends in -amd64, the cloud kernels among it"
        );
    }

    #[test]
    fn series_are_named_by_their_numbers() {
        for series in Series::ALL {
            assert_eq!(series.to_string().parse(), Ok(series));
        }
        assert_eq!("7.x".parse(), Ok(Series::V7));
        assert_eq!(
            "6.2".parse::<Series>().unwrap_err().to_string(),
            "there is no kernel series \"6.2\"; the series are 5.10, 6.1, 6.12, 6.18 and 7"
        );
    }

    #[test]
    fn a_series_is_told_by_whole_numbers() {
        assert!(Series::V6_1.contains("6.1.0-57-cloud-amd64"));
        assert!(!Series::V6_1.contains("6.12.117+deb13-cloud-amd64"));
        assert!(!Series::V6_1.contains("6.18.15+deb13-cloud-amd64"));
        assert!(Series::V7.contains("7.3.4+deb13-cloud-amd64"));
    }
}
