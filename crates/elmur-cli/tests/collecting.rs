//! `elmur collect` that is interrupted, repeated with other wishes, or run twice at once.

#![cfg(unix)]
#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::path::Path;
use std::time::Duration;

use common::*;

fn collect<'a>(length: &'a str, episodes: &'a str, out: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let args = ["collect", "tmaze", "--length", length, "--episodes", episodes, "--out", out];
    [&args[..], more].concat()
}

#[test]
fn a_folder_that_is_replaced_stays_when_the_new_collection_is_killed() {
    let folder = Folder::new("npz-force");
    let npz = folder.path("npz");
    fine(&collect("9", "3", &npz, &["--npz"]));
    let child = start(&collect("300", "1000000", &npz, &["--npz", "--force"]));
    until(format!("{npz}.tmp/train_data_3.npz"), 1);
    // A second one at the same time is refused and disturbs nothing.
    refused(&collect("9", "2", &npz, &["--npz", "--force"]), &["another process writes"]);
    signal(&child, "KILL");
    ended(child, 5);
    assert_eq!(names(&npz).len(), 3);
    fine(&collect("9", "2", &npz, &["--npz", "--force"]));
    assert_eq!((names(&npz).len(), names(&folder.0)), (2, vec!["npz".to_owned()]));
}

#[test]
fn a_folder_of_npz_is_continued_where_it_was_stopped() {
    let folder = Folder::new("npz-resume");
    let [npz, whole] = ["npz", "whole"].map(|name| folder.path(name));
    for (how, told) in [("KILL", ""), ("TERM", "kept beside the folder")] {
        let before = std::fs::read_dir(format!("{npz}.tmp")).map_or(0, Iterator::count);
        let child = start(&collect("300", "1000000", &npz, &["--npz"]));
        until(format!("{npz}.tmp/train_data_{}.npz", before + 3), 1);
        signal(&child, how);
        let said = text(&ended(child, 5));
        assert!(said.contains(told), "{said}");
    }
    refused(&collect("200", "9", &npz, &["--npz"]), &["other settings", "--force"]);
    fine(&collect("300", "9", &npz, &["--npz"]));
    fine(&collect("300", "9", &whole, &["--npz"]));
    assert_eq!(names(&npz), names(&whole));
    for name in names(&npz) {
        let bytes = |of: &str| std::fs::read(format!("{of}/{name}")).unwrap();
        assert!(bytes(&npz) == bytes(&whole), "{name}");
    }
    assert_eq!(names(&folder.0).len(), 2);
}

#[test]
fn a_damaged_collection_goes_on_after_its_sound_episodes_and_says_so() {
    let folder = Folder::new("damaged");
    let [out, whole] = ["a.elmur", "whole.elmur"].map(|name| folder.path(name));
    fine(&collect("30", "9", &whole, &[]));
    fine(&collect("30", "5", &out, &[]));
    // What a power cut may leave behind.
    let zeros = [std::fs::read(&out).unwrap(), vec![0; 4096]].concat();
    std::fs::remove_file(&out).unwrap();
    std::fs::write(format!("{out}.tmp"), &zeros).unwrap();
    // Who does not continue it does not drop it either.
    refused(&["convert", &whole, &out], &["a.elmur.tmp", "--force"]);
    assert!(std::fs::read(format!("{out}.tmp")).unwrap() == zeros);
    let output = ended(start(&collect("30", "9", &out, &[])), 60);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    assert!(text(&output).contains("its first 5 episodes are kept"), "{}", text(&output));
    assert!(std::fs::read(&out).unwrap() == std::fs::read(&whole).unwrap());
}

#[test]
fn fewer_episodes_than_an_interrupted_collection_had_are_those_of_an_undisturbed_one() {
    let folder = Folder::new("fewer");
    let [out, whole, other] = ["a.elmur", "new/folder/whole.elmur", "b.elmur"].map(|name| folder.path(name));
    let child = start(&collect("300", "1000000", &out, &[]));
    until(format!("{out}.tmp"), 100_000);
    signal(&child, "KILL");
    ended(child, 5);
    // Other settings would lose it.
    refused(&collect("200", "5", &out, &[]), &["other settings", "--force"]);
    std::fs::copy(format!("{out}.tmp"), format!("{other}.tmp")).unwrap();
    fine(&collect("300", "5", &out, &[]));
    fine(&collect("300", "5", &whole, &[]));
    assert!(std::fs::read(&out).unwrap() == std::fs::read(&whole).unwrap());
    fine(&collect("200", "5", &other, &["--force"]));
    std::fs::write(folder.path("c.elmur.tmp"), "my notes").unwrap();
    refused(&collect("9", "5", &folder.path("c.elmur"), &["--force"]), &["another file"]);
}

#[test]
fn a_signal_within_a_long_episode_is_heard() {
    let folder = Folder::new("long-episode");
    let out = folder.path("a.elmur");
    let child = start(&collect("1000000000", "1", &out, &[]));
    until(format!("{out}.tmp"), 0);
    std::thread::sleep(Duration::from_millis(300));
    signal(&child, "TERM");
    assert_eq!(ended(child, 5).status.code(), Some(143));
    assert!(!Path::new(&out).exists());
}

#[test]
fn an_interrupted_append_says_how_much_was_added() {
    let folder = Folder::new("append-stop");
    let out = folder.path("a.elmur");
    fine(&collect("300", "5", &out, &[]));
    let before = std::fs::metadata(&out).unwrap().len();
    let child = start(&collect("300", "1000000", &out, &["--append"]));
    until(&out, before + 100_000);
    signal(&child, "TERM");
    let output = ended(child, 5);
    assert!(text(&output).contains("of 1000000 episodes were added"), "{}", text(&output));
}

#[test]
fn an_append_that_is_refused_changes_nothing() {
    let folder = Folder::new("append-refused");
    let out = folder.path("a.elmur");
    fine(&collect("9", "3", &out, &[]));
    let whole = std::fs::read(&out).unwrap();
    let torn = &whole[..whole.len() - 5];
    std::fs::write(&out, torn).unwrap();
    refused(
        &collect("15", "1", &out, &["--append"]),
        &["recorded with another environment, or other settings"],
    );
    assert_eq!(std::fs::read(&out).unwrap(), torn);
    fine(&collect("9", "1", &out, &["--append"]));
    assert_eq!(std::fs::read(&out).unwrap(), whole);
}

/// A program that has gained a setting since a file was begun goes on with it, where the setting has its default.
#[test]
fn files_of_a_program_with_fewer_settings_can_be_continued() {
    let folder = Folder::new("append-older");
    let (now, older) = (folder.path("now.elmur"), folder.path("older.elmur"));
    fine(&collect("30", "2", &now, &[]));
    let data = elmur_data::open(&now, None).unwrap();
    let mut notes = data.metadata().clone();
    assert!(notes.remove("length").is_some(), "{notes:?}");
    let mut writer = elmur_data::Writer::create(&older, data.spaces(), notes).unwrap();
    (0..2).for_each(|i| writer.push(&data.episode(i).unwrap()).unwrap());
    writer.finish().unwrap();
    fine(&collect("30", "1", &older, &["--append"]));
    assert_eq!(elmur_data::open(&older, None).unwrap().episodes(), 3);
    refused(&collect("9", "1", &older, &["--append"]), &["other settings"]);
}

#[test]
fn recordings_are_not_given_another_name() {
    let folder = Folder::new("relabel");
    let (data, out) = (folder.path("a.elmur"), folder.path("b.elmur"));
    fine(&collect("9", "2", &data, &[]));
    refused(
        &["convert", &data, &out, "--env", "popgym-RepeatFirstEasy"],
        &["recorded in tmaze", "leave --env out"],
    );
    assert!(!Path::new(&out).exists());
    mistake(&["eval", &data, "--metric", "luck"], "[possible values: ");
}
