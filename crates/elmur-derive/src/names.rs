//! Spellings of names, as serde's `rename_all` has them.

/// One way to spell a name of several words.
#[derive(Clone, Copy)]
pub enum Case {
    Lower,
    Upper,
    Pascal,
    Camel,
    Snake,
    ScreamingSnake,
    Kebab,
    ScreamingKebab,
}

impl Case {
    /// The spelling of this name; the error lists all.
    pub fn of(name: &str) -> Result<Self, String> {
        Ok(match name {
            "lowercase" => Case::Lower,
            "UPPERCASE" => Case::Upper,
            "PascalCase" => Case::Pascal,
            "camelCase" => Case::Camel,
            "snake_case" => Case::Snake,
            "SCREAMING_SNAKE_CASE" => Case::ScreamingSnake,
            "kebab-case" => Case::Kebab,
            "SCREAMING-KEBAB-CASE" => Case::ScreamingKebab,
            _ => {
                return Err(format!(
                    "`{name}` is none of lowercase, UPPERCASE, PascalCase, camelCase, snake_case, \
                     SCREAMING_SNAKE_CASE, kebab-case, SCREAMING-KEBAB-CASE"
                ));
            }
        })
    }

    /// The name of a variant, which Rust spells `LikeThis`.
    pub fn variant(self, name: &str) -> String {
        let mut snake = String::new();
        for (i, c) in name.chars().enumerate() {
            if i > 0 && c.is_uppercase() {
                snake.push('_');
            }
            snake.extend(c.to_lowercase());
        }
        match self {
            Case::Lower => name.to_lowercase(),
            Case::Upper => name.to_uppercase(),
            _ => self.field(&snake),
        }
    }

    /// The name of a field, which Rust spells `like_this`.
    pub fn field(self, name: &str) -> String {
        let words = || name.split('_').filter(|word| !word.is_empty());
        let capital = |word: &str| {
            let mut letters = word.chars();
            letters.next().map_or(String::new(), |c| c.to_uppercase().chain(letters).collect())
        };
        match self {
            Case::Lower | Case::Snake => name.to_owned(),
            Case::Upper | Case::ScreamingSnake => name.to_uppercase(),
            Case::Kebab => name.replace('_', "-"),
            Case::ScreamingKebab => name.to_uppercase().replace('_', "-"),
            Case::Pascal => words().map(capital).collect(),
            Case::Camel => words()
                .enumerate()
                .map(|(i, word)| if i == 0 { word.to_owned() } else { capital(word) })
                .collect(),
        }
    }
}
