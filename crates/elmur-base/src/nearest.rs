//! Suggestions for misspelt names: "did you mean ...?"

/// "; did you mean `x`?" for the candidate nearest to `word`; empty if no candidate is near.
pub fn did_you_mean<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> String {
    nearest(word, candidates).map(|near| format!("; did you mean `{near}`?")).unwrap_or_default()
}

/// The candidate with the smallest edit distance to `word`, if it is near enough to be what was meant.
/// Candidates are also compared by their last part, behind a dot or a dash.
pub fn nearest<'a>(word: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let last = |path: &'a str| path.rsplit(['.', '-']).next().unwrap_or(path);
    let scored = candidates.map(|c| (distance(word, c).min(distance(word, last(c)) + 1), c));
    let (edits, best) = scored.min_by_key(|(edits, c)| (*edits, c.len()))?;
    (edits <= 1 + word.len() / 4).then_some(best)
}

/// Levenshtein distance.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let change = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_edits_or_the_last_part_are_enough() {
        let names = ["tmaze", "popgym-RepeatFirstEasy", "train.lr"];
        let near = |word| nearest(word, names.into_iter());
        assert_eq!(near("tmase"), Some("tmaze"));
        assert_eq!(near("popgym-repeatfirst-easy"), Some("popgym-RepeatFirstEasy"));
        assert_eq!(near("RepeatFirstEasy"), Some("popgym-RepeatFirstEasy"));
        assert_eq!(near("lr"), Some("train.lr"));
        assert_eq!(near("something else"), None);
    }
}
