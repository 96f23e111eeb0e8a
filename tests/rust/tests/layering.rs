//! The rules of the house that a compiler does not check, read off the sources of transport, core and cuda: who may use whom,
//! no Python and no CUDA, no panics, a reason for every unsafe, and no long files.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::collections::{BTreeMap, BTreeSet};

use offbeat_tests::sources::{Source, root, source, sources, used};

/// For each module, the modules of its crate that it may use. What stands here is allowed, all else is not; the test below
/// makes sure that no circle is allowed. Names that are no modules (`Error`, `Result`, …) are leaves at the crate's root.
const CORE: &[(&str, &[&str])] = &[
    ("lib", &[]),
    ("config", &[]),
    ("topology", &[]),
    ("digest", &[]),
    ("dtype", &[]),
    ("buffer", &["dtype"]),
    ("bucket", &["buffer", "digest", "dtype"]),
    ("readiness", &["bucket"]),
    ("event", &["buffer"]),
    ("reduce", &["dtype"]),
    ("codec", &["reduce"]),
    ("momentum", &[]),
    ("coding", &["codec", "momentum"]),
    ("graph", &["coding"]),
    ("describe", &["codec", "digest", "dtype", "graph"]),
    ("call", &["buffer", "codec", "coding", "describe", "dtype", "graph"]),
    ("collective", &["buffer", "codec", "coding", "config", "describe", "dtype", "graph", "reduce", "topology"]),
    ("message", &["buffer", "config", "describe", "dtype"]),
    ("perform", &["buffer", "call", "collective", "dtype", "event"]),
    ("group", &["call", "collective", "config", "event", "perform", "topology"]),
    (
        "algorithm",
        &[
            "bucket", "buffer", "call", "codec", "coding", "digest", "dtype", "event", "graph", "group", "momentum",
            "reduce",
        ],
    ),
    ("scheduler", &["algorithm", "bucket", "buffer", "call", "coding", "dtype", "event", "group", "readiness"]),
    ("background", &["buffer", "codec", "coding", "event", "graph"]),
    (
        "engine",
        &[
            "algorithm",
            "background",
            "bucket",
            "buffer",
            "call",
            "config",
            "dtype",
            "event",
            "group",
            "message",
            "scheduler",
            "topology",
        ],
    ),
];

/// The modules of core that may talk to the transport, and to which of its modules. Types at its root are free.
const CORE_TO_TRANSPORT: &[(&str, &[&str])] = &[
    ("lib", &[]),
    ("config", &["mesh"]),
    ("describe", &["frame"]),
    ("event", &[]),
    ("buffer", &["shm"]),
    ("collective", &["frame", "inbox", "mesh", "outbox", "pool", "shm", "watchdog"]),
    ("message", &["frame", "inbox", "mesh", "outbox", "shm", "watchdog"]),
    ("group", &["fork", "mesh", "shm", "watchdog"]),
    ("algorithm", &["shm", "trace"]),
    ("scheduler", &["fork", "mesh", "shm", "trace"]),
    ("background", &["fork", "frame", "inbox", "mesh", "roster", "shm"]),
    ("engine", &["fork", "link", "mesh", "rendezvous", "shm", "trace", "watchdog"]),
];

/// As [`CORE`], for the transport.
const TRANSPORT: &[(&str, &[&str])] = &[
    ("lib", &[]),
    ("error", &[]),
    ("fork", &[]),
    ("pool", &[]),
    ("address", &["error"]),
    ("frame", &["error"]),
    ("trace", &["frame"]),
    ("host", &["frame"]),
    ("handshake", &["error", "frame"]),
    ("rendezvous", &["error", "handshake", "host"]),
    ("roster", &["error", "rendezvous"]),
    ("watchdog", &["error", "roster"]),
    ("socket", &["address", "fork"]),
    ("inbox", &["frame", "pool", "watchdog"]),
    ("wire", &["socket"]),
    ("outbox", &["frame", "pool", "socket", "trace", "watchdog", "wire"]),
    ("link", &["error", "frame", "inbox", "outbox", "pool", "roster", "socket", "trace", "wire"]),
    ("shm", &["error", "frame", "handshake", "socket", "watchdog"]),
    ("strangers", &[]),
    ("tcp", &["address", "error", "fork", "handshake", "shm", "socket", "strangers"]),
    ("late", &["address", "error", "rendezvous", "tcp"]),
    ("linking", &["address", "error", "handshake", "late", "link", "rendezvous", "shm", "socket", "tcp"]),
    (
        "mesh",
        &[
            "address",
            "error",
            "fork",
            "frame",
            "handshake",
            "host",
            "inbox",
            "late",
            "link",
            "linking",
            "outbox",
            "pool",
            "rendezvous",
            "roster",
            "shm",
            "socket",
            "strangers",
            "tcp",
            "trace",
            "watchdog",
        ],
    ),
];

/// As [`CORE`], for CUDA.
const CUDA: &[(&str, &[&str])] = &[
    ("lib", &[]),
    ("story", &[]),
    ("nccl", &[]),
    ("library", &["nccl"]),
    ("device", &["library"]),
    ("stream", &["device", "story"]),
    ("memory", &["stream"]),
    ("module", &["device", "stream"]),
    ("plan", &[]),
    ("kernels", &["device", "module", "plan", "stream"]),
    ("communicator", &["device", "nccl", "story", "stream"]),
    ("watch", &["communicator", "stream"]),
    ("collective", &["communicator", "kernels", "memory", "plan", "stream"]),
    ("compressed", &["collective", "kernels", "memory", "plan", "stream"]),
    ("gossip", &["collective", "kernels", "memory", "plan", "stream"]),
    ("select", &["collective", "gossip", "kernels", "memory", "plan", "stream"]),
    ("low_rank", &["collective", "kernels", "memory", "plan", "stream"]),
    ("momentum", &["collective", "kernels", "memory", "plan", "stream"]),
    ("outer", &["collective", "kernels", "memory", "plan", "stream"]),
    ("replicas", &["collective", "gossip", "kernels", "memory", "plan", "stream"]),
    ("queue", &["collective", "compressed", "gossip", "stream", "watch"]),
    ("pinned", &["device", "stream"]),
    ("odd", &["pinned", "queue"]),
    (
        "carrier",
        &[
            "collective",
            "compressed",
            "gossip",
            "kernels",
            "low_rank",
            "memory",
            "momentum",
            "odd",
            "outer",
            "queue",
            "replicas",
            "select",
            "stream",
        ],
    ),
    ("ferry", &["device", "pinned", "stream"]),
    (
        "site",
        &[
            "carrier",
            "collective",
            "communicator",
            "device",
            "ferry",
            "kernels",
            "memory",
            "nccl",
            "queue",
            "stream",
            "watch",
        ],
    ),
];

/// What CUDA may know of core: values, traits and pure functions; no engine, no scheduler, no group, no mesh.
const CUDA_TO_CORE: &[&str] =
    &["algorithm", "background", "bucket", "buffer", "codec", "coding", "dtype", "event", "graph", "topology"];

const LONGEST_FILE: usize = 600;

/// Words that do not belong into transport and core, and the one place that may know of the other kind of memory.
const FOREIGN: [&str; 4] = ["pyo3", "cuda", "nccl", "pythonize"];
const KNOWS_PLACES: (&str, &str) = ("rust/core/src/buffer.rs", "Cuda(u32)");

type Table = &'static [(&'static str, &'static [&'static str])];

fn allowed(table: Table, module: &str) -> Option<BTreeSet<&'static str>> {
    table.iter().find(|(name, _)| *name == module).map(|(_, uses)| uses.iter().copied().collect())
}

/// Uses that a table does not allow.
fn wrong_uses(source: &Source, table: Table, prefixes: &[&str]) -> Vec<String> {
    let Some(allowed) = allowed(table, &source.module) else {
        return vec![format!("{}: the table of dependence does not know the module {}", source.path, source.module)];
    };
    let modules: BTreeSet<&str> = table.iter().map(|(name, _)| *name).collect();
    let names: BTreeSet<String> = prefixes.iter().flat_map(|prefix| used(&source.code, prefix)).collect();
    let is_wrong =
        |name: &&String| modules.contains(name.as_str()) && **name != source.module && !allowed.contains(name.as_str());
    names.iter().filter(is_wrong).map(|name| format!("{}: {} may not use {name}", source.path, source.module)).collect()
}

fn wrong_uses_of_transport(source: &Source) -> Vec<String> {
    let names = used(&source.code, "offbeat_transport");
    let modules = names.iter().filter(|name| name.starts_with(char::is_lowercase));
    let allowed = allowed(CORE_TO_TRANSPORT, &source.module);
    if allowed.is_none() && !names.is_empty() {
        return vec![format!("{}: {} may not know the transport", source.path, source.module)];
    }
    let allowed = allowed.unwrap_or_default();
    modules
        .filter(|name| !allowed.contains(name.as_str()))
        .map(|name| format!("{}: {} may not use the transport's {name}", source.path, source.module))
        .collect()
}

fn wrong_uses_of_core(source: &Source) -> Vec<String> {
    let names = used(&source.code, "offbeat_core");
    let modules = names.iter().filter(|name| name.starts_with(char::is_lowercase));
    let wrong = modules.filter(|name| !CUDA_TO_CORE.contains(&name.as_str()));
    wrong.map(|name| format!("{}: may not use the core's {name}", source.path)).collect()
}

fn foreign_words(source: &Source) -> Vec<String> {
    let known = |line: &str| source.path == KNOWS_PLACES.0 && line.contains(KNOWS_PLACES.1);
    let lines = source.code.lines().enumerate().filter(|(_, line)| !known(line));
    let found = lines.filter(|(_, line)| FOREIGN.iter().any(|word| line.to_lowercase().contains(word)));
    found.map(|(at, line)| format!("{}:{}: a foreign word in {:?}", source.path, at + 1, line.trim())).collect()
}

fn panics(source: &Source) -> Vec<String> {
    let words = [".unwrap()", ".expect(", "panic!(", "todo!(", "unimplemented!("];
    let lines = source.code.lines().enumerate().filter(|(_, line)| words.iter().any(|word| line.contains(word)));
    lines.map(|(at, line)| format!("{}:{}: may panic: {:?}", source.path, at + 1, line.trim())).collect()
}

/// Every unsafe block and impl has a SAFETY comment shortly before it, every visible unsafe fn a `# Safety` in its docs.
/// The promise of a private unsafe fn stands where it is called.
fn unexplained_unsafe(source: &Source) -> Vec<String> {
    let text: Vec<&str> = source.text.lines().collect();
    let mut found = Vec::new();
    for (at, line) in source.code.lines().enumerate() {
        let mut words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
        if !words.any(|word| word == "unsafe") {
            continue;
        }
        let function = line.contains("unsafe fn");
        if function && !line.trim_start().starts_with("pub") {
            continue;
        }
        let reach = if function { 12 } else { 6 };
        let before = &text[at.saturating_sub(reach)..=at];
        let explained = |line: &&str| line.contains("// SAFETY:") || line.contains("# Safety");
        if !before.iter().any(explained) {
            found.push(format!("{}:{}: unsafe without a reason: {:?}", source.path, at + 1, line.trim()));
        }
    }
    found
}

fn too_long(source: &Source) -> Vec<String> {
    let lines = source.text.lines().count();
    if lines <= LONGEST_FILE { Vec::new() } else { vec![format!("{}: {lines} lines without tests", source.path)] }
}

fn prefixes(source: &Source) -> &'static [&'static str] {
    if source.at_root { &["crate", "super"] } else { &["crate"] }
}

fn check(source: &Source, table: Table) -> Vec<String> {
    [
        wrong_uses(source, table, prefixes(source)),
        foreign_words(source),
        panics(source),
        unexplained_unsafe(source),
        too_long(source),
    ]
    .concat()
}

fn assert_none(wrong: &[String]) {
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn core_keeps_the_rules() {
    let wrong: Vec<String> = sources("rust/core")
        .iter()
        .flat_map(|source| [check(source, CORE), wrong_uses_of_transport(source)].concat())
        .collect();
    assert_none(&wrong);
}

#[test]
fn transport_keeps_the_rules_and_knows_no_core() {
    let mut wrong: Vec<String> = Vec::new();
    for source in sources("rust/transport") {
        wrong.extend(check(&source, TRANSPORT));
        wrong.extend(source.code.contains("offbeat_core").then(|| format!("{}: knows the core", source.path)));
    }
    assert_none(&wrong);
}

#[test]
fn cuda_keeps_the_rules_and_knows_cores_traits_only() {
    let mut wrong: Vec<String> = Vec::new();
    for source in sources("rust/cuda") {
        wrong.extend(wrong_uses(&source, CUDA, prefixes(&source)));
        wrong.extend(wrong_uses_of_core(&source));
        wrong.extend([panics(&source), unexplained_unsafe(&source), too_long(&source)].concat());
        wrong
            .extend(source.code.contains("offbeat_transport").then(|| format!("{}: knows the transport", source.path)));
        wrong.extend(source.code.contains("pyo3").then(|| format!("{}: knows Python", source.path)));
    }
    assert_none(&wrong);
}

#[test]
fn manifests_name_no_crate_of_another_floor() {
    let floors = [
        ("transport", &["offbeat-core", "offbeat-cuda", "pyo3", "cudarc", "half"][..]),
        ("core", &["offbeat-cuda", "pyo3", "cudarc"]),
        ("cuda", &["offbeat-transport", "pyo3"]),
    ];
    for (of, words) in floors {
        let manifest = std::fs::read_to_string(root().join(format!("rust/{of}/Cargo.toml"))).unwrap();
        let wrong: Vec<&&str> = words.iter().filter(|word| manifest.contains(**word)).collect();
        assert!(wrong.is_empty(), "rust/{of}/Cargo.toml names {wrong:?}");
    }
}

#[test]
fn the_tables_allow_no_circle_and_name_what_is_there() {
    for (of, table) in [("rust/core", CORE), ("rust/transport", TRANSPORT), ("rust/cuda", CUDA)] {
        let mut left: BTreeMap<&str, BTreeSet<&str>> =
            table.iter().map(|(name, uses)| (*name, uses.iter().copied().collect())).collect();
        while !left.is_empty() {
            let free: Vec<&str> = left.iter().filter(|(_, uses)| uses.is_empty()).map(|(name, _)| *name).collect();
            assert!(!free.is_empty(), "{of}: a circle, or a name that is no module, among {left:?}");
            left.retain(|name, _| !free.contains(name));
            left.values_mut().for_each(|uses| uses.retain(|name| !free.contains(name)));
        }
        let there: BTreeSet<String> = sources(of).into_iter().map(|source| source.module).collect();
        let gone: Vec<&str> = table.iter().map(|(name, _)| *name).filter(|name| !there.contains(*name)).collect();
        assert!(gone.is_empty(), "{of}: the table names {gone:?}, which are gone");
    }
}

/// A rule that cannot fail is none.
#[test]
fn every_rule_finds_its_offender() {
    let of = |inside: &str, text: &str| source(format!("rust/core/src/{inside}"), inside, text);
    let offends = |rule: &dyn Fn(&Source) -> Vec<String>, inside: &str, text: &str| rule(&of(inside, text)).len();
    let uses = |source: &Source| wrong_uses(source, CORE, prefixes(source));
    assert_eq!(offends(&uses, "dtype.rs", "use crate::engine::Engine;"), 1);
    assert_eq!(offends(&uses, "dtype.rs", "use crate::{Error, engine::{a, b}, group};"), 2);
    assert_eq!(offends(&uses, "dtype.rs", "fn f() { crate::engine::go(); super::group::go() }"), 2);
    assert_eq!(offends(&uses, "collective/blocks.rs", "use super::group; use crate::call::Call;"), 1);
    assert_eq!(offends(&uses, "collective/mod.rs", "use super::group;"), 1);
    assert_eq!(offends(&uses, "nobody.rs", ""), 1);
    assert_eq!(offends(&uses, "dtype.rs", "// crate::engine\n#[cfg(test)]\nmod tests { use crate::engine; }"), 0);
    assert_eq!(offends(&uses, "engine.rs", "use crate::group::Group; const S: &str = \"crate::python\";"), 0);

    assert_eq!(offends(&wrong_uses_of_transport, "topology.rs", "use offbeat_transport::SLICE;"), 1);
    assert_eq!(
        offends(&wrong_uses_of_transport, "group.rs", "use offbeat_transport::{Error, tcp::dial, mesh::Mesh};"),
        1
    );

    assert_eq!(offends(&wrong_uses_of_core, "queue.rs", "use offbeat_core::{Error, event::Event, engine::Engine};"), 1);

    assert_eq!(offends(&foreign_words, "engine.rs", "fn cuda_stream() {}\n// CUDA\nlet s = \"pyo3\";"), 1);
    assert_eq!(offends(&foreign_words, "buffer.rs", "Cuda(u32),"), 0);

    assert_eq!(offends(&panics, "engine.rs", "x.unwrap();\ny\n.expect(\"a\");\npanic!(\"b\");"), 3);
    assert_eq!(offends(&panics, "engine.rs", "// x.unwrap()\n#[expect(dead_code)]\nx.unwrap_or(1);"), 0);
    assert_eq!(offends(&panics, "engine.rs", "#[cfg(test)]\nmod tests { fn f() { '{'; x.unwrap() } }\ny.unwrap();"), 1);

    assert_eq!(offends(&unexplained_unsafe, "engine.rs", "unsafe { f() };\nunsafe impl Send for X {}"), 2);
    assert_eq!(offends(&unexplained_unsafe, "engine.rs", "// SAFETY: so.\nunsafe { f() };\n// unsafe"), 0);
    assert_eq!(offends(&unexplained_unsafe, "engine.rs", "/// Does.\npub unsafe fn f() {}"), 1);
    assert_eq!(offends(&unexplained_unsafe, "engine.rs", "/// # Safety\n/// Promise.\npub unsafe fn f() {}"), 0);

    assert_eq!(offends(&too_long, "engine.rs", &"x\n".repeat(601)), 1);
    assert_eq!(offends(&too_long, "engine.rs", &format!("#[cfg(test)]\nmod tests {{\n{}}}", "x\n".repeat(601))), 0);
}
