//! Atomic writes, reads of small files, sizes.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::error::{Error, Result};

/// Writes a file atomically: to a temporary file beside it, which is synced and renamed into place. Readers
/// see the old file or the new one, never a part of either. Temporary files that processes which died have left
/// of the same file are removed.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<()> {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("file");
    let write = || -> std::io::Result<()> {
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let aside = path.with_file_name(format!(".{name}.{}.{number}.tmp", std::process::id()));
        let mut file = File::create(&aside)?;
        // The lock tells other processes that this one is alive. Not every file system has locks.
        let _ = file.try_lock();
        let written =
            file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| rename(&aside, path));
        written.inspect_err(|_| {
            let _ = fs::remove_file(&aside);
        })
    };
    // Another process may have found the temporary file before its lock, and removed it.
    let again = |e: std::io::Error| if e.kind() == ErrorKind::NotFound { write() } else { Err(e) };
    write().or_else(again).map_err(|cause| Error::io(path, cause))?;
    remove_abandoned(path, name);
    Ok(())
}

/// Removes temporary files of `path` that no process is writing. What cannot be removed stays.
fn remove_abandoned(path: &Path, name: &str) {
    for entry in fs::read_dir(folder_of(path)).into_iter().flatten().flatten() {
        let found = entry.file_name();
        let numbers = found.to_str().and_then(|found| found.strip_prefix('.')?.strip_prefix(name));
        let numbers = numbers.and_then(|rest| rest.strip_prefix('.')?.strip_suffix(".tmp")?.split_once('.'));
        let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        if numbers.is_some_and(|(process, count)| number(process) && number(count))
            && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok())
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The folder that a file lies in.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Renames a file and syncs its folder where the system allows that, so that the rename survives a crash.
pub fn rename(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::rename(from, to)?;
    let _ = File::open(folder_of(to)).and_then(|folder| folder.sync_all());
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

/// Bytes of a file, or of all files in a folder and below; 0 for what cannot be read.
pub fn size_of(path: &Path) -> u64 {
    match fs::read_dir(path) {
        Ok(entries) => entries.flatten().map(|entry| size_of(&entry.path())).sum(),
        Err(_) => fs::metadata(path).map_or(0, |about| about.len()),
    }
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

    #[test]
    fn what_a_dead_process_left_is_removed_by_the_next_write_of_the_same_file() {
        let folder = std::env::temp_dir().join(format!("elmur-base-abandoned-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let alive = File::create(folder.join(".a.json.7.1.tmp")).unwrap();
        alive.lock().unwrap();
        for name in [".a.json.7.0.tmp", ".b.json.7.0.tmp", ".a.json.tmp", ".a.json.mine.0.tmp"] {
            fs::write(folder.join(name), b"half").unwrap();
        }
        write_atomic(&folder.join("a.json"), b"whole").unwrap();
        let mut left: Vec<_> =
            fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        left.sort();
        assert_eq!(
            left,
            [".a.json.7.1.tmp", ".a.json.mine.0.tmp", ".a.json.tmp", ".b.json.7.0.tmp", "a.json"]
        );
        fs::remove_dir_all(&folder).unwrap();
    }
}
