//! Atomic writes, and reads of small files.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Error, Result};

/// Writes a file atomically: to a temporary file beside it, which is synced and renamed into place. Readers
/// see the old file or the new one, never a part of either.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("file");
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let aside = path.with_file_name(format!(".{name}.{}.{number}.tmp", std::process::id()));
    let write = || -> std::io::Result<()> {
        let mut file = File::create(&aside)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        rename(&aside, path)
    };
    write().map_err(|cause| {
        let _ = fs::remove_file(&aside);
        Error::io(path, cause)
    })
}

/// Renames a file and syncs its folder where the system allows that, so that the rename survives a crash.
pub fn rename(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::rename(from, to)?;
    let folder = to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
    Ok(())
}

/// Reads a text file of at most `most` bytes. A larger file is an error before any of it is read.
pub fn read_small(path: &Path, most: u64) -> Result<String> {
    let size = fs::metadata(path).map_err(|e| Error::io(path, e))?.len();
    if size > most {
        let problem =
            format!("{size} bytes, more than any file of this kind has ({most}); is it the right file?");
        return Err(Error::file(path, problem));
    }
    fs::read_to_string(path).map_err(|e| Error::io(path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_replaced_whole_and_nothing_is_left_aside() {
        let folder = std::env::temp_dir().join(format!("elmur-base-files-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("a.json");
        write_atomic(&path, b"one").unwrap();
        write_atomic(&path, b"two").unwrap();
        assert_eq!(read_small(&path, 3).unwrap(), "two");
        assert!(read_small(&path, 2).unwrap_err().to_string().contains("3 bytes"));
        // A name that cannot be replaced: the error names it, and what was written aside is gone.
        fs::create_dir(folder.join("taken")).unwrap();
        fs::write(folder.join("taken/file"), b"x").unwrap();
        let error = write_atomic(&folder.join("taken"), b"three").unwrap_err().to_string();
        assert!(error.contains("taken"), "{error}");
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2);
        fs::remove_dir_all(&folder).unwrap();
    }
}
