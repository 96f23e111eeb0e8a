//! Embeds the PTX in `kernels/ptx` at the root of the repository, one image for each source file of the kernels.

#![allow(clippy::print_stdout, reason = "this is how a build script talks to cargo")]

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let root = std::env::var("CARGO_MANIFEST_DIR")?;
    let folder = Path::new(&root).join("../../kernels/ptx");
    let mut images = Vec::new();
    if folder.is_dir() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path().canonicalize()?;
            if path.extension().is_some_and(|extension| extension == "ptx") {
                images.push(path);
            }
        }
        println!("cargo::rerun-if-changed={}", folder.display());
    }
    images.sort();
    let line = |path: &std::path::PathBuf| {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        format!("    ({name:?}, include_str!({:?})),\n", path.display().to_string())
    };
    let lines: String = images.iter().map(line).collect();
    let text = format!("&[\n{lines}]\n");
    std::fs::write(Path::new(&std::env::var("OUT_DIR")?).join("images.rs"), text)?;
    println!("cargo::rerun-if-changed=build.rs");
    Ok(())
}
