//! Ranks as processes on the doubles of libcuda and libnccl (`tests/gpu/doubles`).
//!
//! A test starts its own executable once for each rank, with `rank` as the only test to run, and reads what they said. The
//! doubles are compiled by g++ when their sources are newer than the libraries.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking"
)]

pub mod process;
pub mod reference;
pub mod twins;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Long enough for a loaded machine; whoever needs longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/gpu/doubles")
}

/// A folder with both doubles in it.
pub fn doubles() -> &'static Path {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("doubles");
        std::fs::create_dir_all(&folder).unwrap();
        compile(&folder, "libcuda.so.1", &["libcuda.cpp", "streams.h", "double.h"], &["-ldl"]);
        compile(&folder, "libnccl.so.2", &["libnccl.cpp", "double.h"], &["-l:libcuda.so.1"]);
        folder
    })
}

/// A folder with one library, copied from those above or made of a line of C++.
pub fn folder_with(name: &str, library: &str, text: Option<&str>) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&folder).unwrap();
    match text {
        None => drop(std::fs::copy(doubles().join(library), folder.join(library)).unwrap()),
        Some(text) => {
            let source = folder.join("source.cpp");
            std::fs::write(&source, text).unwrap();
            call_compiler(Command::new("g++").arg(&source), &folder.join(library), library);
        }
    }
    folder
}

fn compile(folder: &Path, name: &str, files: &[&str], libraries: &[&str]) {
    let library = folder.join(name);
    let changed = |path: &Path| path.metadata().and_then(|data| data.modified()).ok();
    let newest = files.iter().filter_map(|file| changed(&sources().join(file))).max();
    if changed(&library).is_none_or(|made| newest.is_some_and(|newest| newest > made)) {
        let mut command = Command::new("g++");
        command.args(["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]).arg(sources().join(files[0]));
        command.arg("-L").arg(folder).args(libraries);
        call_compiler(&mut command, &library, name);
    }
}

fn call_compiler(command: &mut Command, library: &Path, soname: &str) {
    let command = command.args(["-shared", "-fPIC"]).arg(format!("-Wl,-soname,{soname}")).arg("-o").arg(library);
    let output = command.output().expect("g++ makes doubles of CUDA's libraries; try: apt install g++");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Ranks to be started.
pub struct Ranks {
    case: &'static str,
    hosts: Vec<usize>,
    library_path: PathBuf,
    variables: Vec<(String, String)>,
    of_rank: Vec<(usize, String, String)>,
}

/// What became of a rank.
pub struct Said {
    pub ok: bool,
    pub text: String,
}

impl Ranks {
    /// `hosts` are the numbers of ranks on each.
    pub fn of(case: &'static str, hosts: &[usize]) -> Self {
        let library_path = doubles().to_path_buf();
        Ranks { case, hosts: hosts.to_vec(), library_path, variables: Vec::new(), of_rank: Vec::new() }
    }

    pub fn with(mut self, name: &str, value: impl ToString) -> Self {
        self.variables.push((name.to_owned(), value.to_string()));
        self
    }

    pub fn with_on(mut self, rank: usize, name: &str, value: impl ToString) -> Self {
        self.of_rank.push((rank, name.to_owned(), value.to_string()));
        self
    }

    pub fn libraries(mut self, folder: impl Into<PathBuf>) -> Self {
        self.library_path = folder.into();
        self
    }

    /// Runs all ranks to their end.
    pub fn run(self) -> Vec<Said> {
        let meeting = std::env::temp_dir().join(format!("offbeat-cuda-{}-{}", std::process::id(), unique()));
        std::fs::create_dir_all(&meeting).unwrap();
        let world: usize = self.hosts.iter().sum();
        let hosts: Vec<String> = self.hosts.iter().map(usize::to_string).collect();
        let start = |rank: usize| -> Child {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", "rank", "--ignored", "--nocapture", "--test-threads", "1"]);
            command.env("LD_LIBRARY_PATH", &self.library_path).env("CASE", self.case).env("MEETING", &meeting);
            command.env("RANK", rank.to_string()).env("HOSTS", hosts.join(","));
            command.env("FAKECUDA_REPORT", "1").env("FAKENCCL_REPORT", "1").env("FAKENCCL_FOLDER", &meeting);
            command.envs(self.variables.iter().map(|(name, value)| (name, value)));
            let own = self.of_rank.iter().filter(|(of, _, _)| *of == rank);
            command.envs(own.map(|(_, name, value)| (name, value)));
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
        };
        let children: Vec<Child> = (0..world).map(start).collect();
        let said = children.into_iter().enumerate().map(|(rank, child)| finish(self.case, rank, child)).collect();
        std::fs::remove_dir_all(&meeting).unwrap();
        said
    }

    /// Runs all ranks, which must all succeed and leak nothing.
    pub fn succeed(self) -> Vec<Said> {
        let told = format!("{} on {:?} {:?}", self.case, self.hosts, self.variables);
        let said = self.run();
        for (rank, said) in said.iter().enumerate() {
            assert!(said.ok, "{told}: rank {rank}: {}", said.text);
            said.assert_no_leak(&format!("{told}: rank {rank}"));
        }
        said
    }
}

impl Said {
    pub fn assert_no_leak(&self, told: &str) {
        for clean in [
            "libcuda double: leaked memory=0 streams=0 events=0 modules=0 contexts=0;",
            "libnccl double: leaked communicators=0;",
        ] {
            assert!(self.text.contains(clean), "{told}: {}", self.text);
        }
    }
}

fn finish(case: &str, rank: usize, mut child: Child) -> Said {
    let began = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if began.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("{case}: rank {rank} hangs");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
    Said { ok: status.success(), text }
}

fn unique() -> u64 {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}
