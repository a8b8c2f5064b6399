//! Descriptions of settings follow doc comments and serde's names.

#![allow(dead_code)]

use elmur_base::{Describe, Description, describe_all, description_of};
use serde::Deserialize;

/// A run.
#[derive(Deserialize, Describe)]
struct Run {
    /// How long it takes,
    /// in hours.
    ///
    /// At least one.
    hours: f64,
    /// Who does it.
    worker: Worker,
    /// Number of steps after which a job stops early; none: never.
    limit: Option<Limit>,
    /// Shapes that are cut.
    shapes: Vec<Shape>,
    /// Range of colours, lowest and highest.
    #[serde(rename = "colors")]
    colours: (u8, u8),
    /// Never in files.
    #[serde(skip)]
    hidden: usize,
    #[serde(flatten)]
    rest: Rest,
    /// Something that describes nothing itself.
    #[describe(leaf)]
    opaque: Opaque,
}

#[derive(Deserialize)]
struct Opaque;

/// More.
#[derive(Deserialize, Describe)]
#[serde(rename_all = "camelCase")]
struct Rest {
    /// Beside the others.
    side_by_side: bool,
}

/// The worker that does a job.
///
/// For programmers: the list is closed.
#[derive(Deserialize, Describe)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Worker {
    /// One that reads.
    BookReader(Reader),
    /// One that writes.
    Writer {
        /// Words per minute.
        speed: usize,
    },
    /// One that rests.
    Sleeper,
}

#[derive(Deserialize, Describe)]
struct Reader {
    /// Pages per minute.
    speed: usize,
}

#[derive(Deserialize, Describe)]
struct Limit {
    /// Seconds until then.
    after: f64,
}

/// A shape.
#[derive(Deserialize, Describe)]
#[serde(rename_all = "snake_case")]
enum Shape {
    /// Nothing at all.
    Empty,
    /// A round one.
    FullCircle {
        /// From the middle to the rim.
        radius: f64,
    },
    /// As many equal sides as the number says.
    Regular(usize),
    /// A shape inside another.
    #[serde(rename = "in")]
    Inside(Limit),
}

fn keys<T: Describe>() -> Vec<(String, String)> {
    describe_all::<T>().into_iter().map(|d| (d.key, d.text)).collect()
}

#[test]
fn every_setting_is_described_under_the_key_that_serde_reads() {
    let expected = [
        ("hours", "How long it takes, in hours. At least one."),
        ("worker", "Who does it."),
        ("worker.kind", "The worker that does a job."),
        ("worker.speed", "Pages per minute."),
        ("worker.speed", "Words per minute."),
        ("limit", "Number of steps after which a job stops early; none: never."),
        ("limit.after", "Seconds until then."),
        ("shapes", "Shapes that are cut."),
        ("shapes.*.full_circle", "A round one."),
        ("shapes.*.full_circle.radius", "From the middle to the rim."),
        ("shapes.*.regular", "As many equal sides as the number says."),
        ("shapes.*.in", "A shape inside another."),
        ("shapes.*.in.after", "Seconds until then."),
        ("colors", "Range of colours, lowest and highest."),
        ("sideBySide", "Beside the others."),
        ("opaque", "Something that describes nothing itself."),
    ];
    assert_eq!(keys::<Run>(), expected.map(|(key, text)| (key.to_owned(), text.to_owned())));
}

#[test]
fn fields_that_hold_an_enum_list_its_variants() {
    let all = describe_all::<Run>();
    let names = |key: &str| {
        let found = description_of(&all, key).unwrap();
        found.choices.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names("worker.kind"), ["book_reader", "writer", "sleeper"]);
    assert_eq!(names("shapes"), ["empty", "full_circle", "regular", "in"]);
    assert_eq!(names("hours"), [""; 0]);
    assert_eq!(Shape::choices()[0], ("empty".to_owned(), "Nothing at all."));
}

#[test]
fn settings_of_one_variant_say_when_they_exist() {
    let all = describe_all::<Run>();
    let when = |text: &str| all.iter().find(|d| d.text == text).unwrap().when.clone();
    let kind = |name: &str| Some(("worker.kind".to_owned(), name.to_owned()));
    assert_eq!(when("Pages per minute."), kind("book_reader"));
    assert_eq!(when("Words per minute."), kind("writer"));
    assert_eq!(when("The worker that does a job."), None);
    assert_eq!(when("How long it takes, in hours. At least one."), None);
}

#[test]
fn a_key_is_found_by_index_and_by_what_contains_it() {
    let all = describe_all::<Run>();
    let text = |key: &str| description_of(&all, key).map(|d: &Description| d.text.as_str());
    assert_eq!(text("shapes.3.full_circle.radius"), Some("From the middle to the rim."));
    assert_eq!(text("shapes.3.regular"), Some("As many equal sides as the number says."));
    assert_eq!(text("colors.1"), Some("Range of colours, lowest and highest."));
    assert_eq!(text("shape.3"), None);
    assert_eq!(text(""), None);
}
