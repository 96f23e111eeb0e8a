//! The sources of a crate as text: without tests, with comments and literals blanked, and what they use.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// A file of a crate.
pub struct Source {
    /// From the root of the repository.
    pub path: String,
    /// The module at the root of the crate to which the file belongs.
    pub module: String,
    /// Whether `super` is the root of the crate.
    pub at_root: bool,
    /// The text without its tests.
    pub text: String,
    /// The same, with comments and literals blanked.
    pub code: String,
}

/// The repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// All files of a crate.
pub fn sources(of: &str) -> Vec<Source> {
    let base = root().join(of).join("src");
    let (mut found, mut directories) = (Vec::new(), vec![base.clone()]);
    while let Some(directory) = directories.pop() {
        for entry in std::fs::read_dir(&directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let inside = path.strip_prefix(&base).unwrap().to_string_lossy().into_owned();
                found.push(source(format!("{of}/src/{inside}"), &inside, &std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    assert!(found.len() > 5, "no sources under {}", base.display());
    found
}

/// A file with a text; `inside` is its path in `src`.
pub fn source(path: String, inside: &str, text: &str) -> Source {
    let module = inside.split('/').next().unwrap_or_default().trim_end_matches(".rs").to_owned();
    let at_root = !inside.contains('/') || inside.matches('/').count() == 1 && inside.ends_with("/mod.rs");
    let (text, code) = without_tests(text);
    Source { path, module, at_root, text, code }
}

/// Blanks comments and literals; every line keeps its length.
fn blank(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out: Vec<char> = Vec::with_capacity(chars.len());
    let mut at = 0;
    let space = |out: &mut Vec<char>, from: usize, to: usize| {
        out.extend(chars[from..to].iter().map(|c| if *c == '\n' { '\n' } else { ' ' }));
    };
    while at < chars.len() {
        let rest = &chars[at..];
        let starts = |with: &str| with.chars().enumerate().all(|(i, c)| rest.get(i) == Some(&c));
        let len = if starts("//") {
            rest.iter().position(|c| *c == '\n').unwrap_or(rest.len())
        } else if starts("/*") {
            block_comment(rest)
        } else if let Some(len) = raw_string(rest, out.last()) {
            len
        } else if starts("\"") {
            quoted(rest, '"')
        } else if starts("'") && (rest.get(1) == Some(&'\\') || rest.get(2) == Some(&'\'')) {
            quoted(rest, '\'')
        } else {
            out.push(chars[at]);
            at += 1;
            continue;
        };
        space(&mut out, at, at + len);
        at += len;
    }
    out.into_iter().collect()
}

fn block_comment(rest: &[char]) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at + 1 < rest.len() {
        match (rest[at], rest[at + 1]) {
            ('/', '*') => (depth, at) = (depth + 1, at + 2),
            ('*', '/') => {
                (depth, at) = (depth - 1, at + 2);
                if depth == 0 {
                    return at;
                }
            }
            _ => at += 1,
        }
    }
    rest.len()
}

fn raw_string(rest: &[char], before: Option<&char>) -> Option<usize> {
    if rest.first() != Some(&'r') || before.is_some_and(|c| c.is_alphanumeric() && *c != 'b' || *c == '_') {
        return None;
    }
    let hashes = rest[1..].iter().take_while(|c| **c == '#').count();
    if rest.get(1 + hashes) != Some(&'"') {
        return None;
    }
    let end: Vec<char> = std::iter::once('"').chain(std::iter::repeat_n('#', hashes)).collect();
    let begin = 2 + hashes;
    let length = rest[begin..].windows(end.len()).position(|w| w == end).map_or(rest.len(), |p| begin + p + end.len());
    Some(length)
}

fn quoted(rest: &[char], quote: char) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != quote {
        at += if rest[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}

/// Cuts every item under `#[cfg(test)]` out of a text: what is left, and the same blanked.
fn without_tests(text: &str) -> (String, String) {
    let mut text: Vec<char> = text.chars().collect();
    let mut code: Vec<char> = blank(&text.iter().collect::<String>()).chars().collect();
    let mark: Vec<char> = "#[cfg(test)]".chars().collect();
    while let Some(begin) = code.windows(mark.len()).position(|w| w == mark) {
        let mut depth = 0usize;
        let mut end = begin + mark.len();
        while end < code.len() {
            match code[end] {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            end += 1;
            if depth == 0 && matches!(code[end - 1], '}' | ';') {
                break;
            }
        }
        text.drain(begin..end);
        code.drain(begin..end);
    }
    (text.into_iter().collect(), code.into_iter().collect())
}

/// The first names after `prefix::`, also in lists: `crate::a::b` and `crate::{a::b, c}` use `a` and `c`.
pub fn used(code: &str, prefix: &str) -> BTreeSet<String> {
    let word = |text: &str| -> String { text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect() };
    let mut names = BTreeSet::new();
    for (at, _) in code.match_indices(&format!("{prefix}::")) {
        if code[..at].chars().next_back().is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
            continue;
        }
        let rest = &code[at + prefix.len() + 2..];
        let Some(list) = rest.strip_prefix('{') else {
            names.insert(word(rest));
            continue;
        };
        let (mut depth, mut fresh) = (0, true);
        for (at, c) in list.char_indices() {
            match c {
                '{' => depth += 1,
                '}' if depth == 0 => break,
                '}' => depth -= 1,
                ',' if depth == 0 => fresh = true,
                c if fresh && !c.is_whitespace() => {
                    names.insert(word(&list[at..]));
                    fresh = false;
                }
                _ => {}
            }
        }
    }
    names
}
