//! Parameters of the published Python code, and how ours are made of them.
//!
//! Ours fuse what is used together (keys with values, gates with up-projections, experts). Every published
//! tensor is one rectangle of one of ours, so both directions are copies.

use std::collections::{BTreeMap, BTreeSet};

use crate::ends::{Action, Encoder};
use crate::error::{Error, Result};
use crate::tensors::Tensors;

/// One published tensor as a rectangle of one of ours.
#[derive(Debug, Clone)]
pub struct Piece {
    /// Possible published names; the first is the usual one.
    pub published: Vec<String>,
    /// Our parameter.
    pub own: String,
    /// Shape of our parameter seen as a matrix.
    pub matrix: (usize, usize),
    /// First row and column.
    pub at: (usize, usize),
    /// Rows and columns.
    pub size: (usize, usize),
}

impl Piece {
    /// Copies the published tensor into ours.
    fn insert(&self, published: &[f64], own: &mut [f64]) {
        for (row, source) in published.chunks_exact(self.size.1).enumerate() {
            let start = (self.at.0 + row) * self.matrix.1 + self.at.1;
            own[start..start + self.size.1].copy_from_slice(source);
        }
    }

    /// Copies the rectangle out of ours.
    pub fn extract(&self, own: &[f64]) -> Vec<f64> {
        let row = |r: usize| &own[(self.at.0 + r) * self.matrix.1 + self.at.1..][..self.size.1];
        (0..self.size.0).flat_map(|r| row(r).to_vec()).collect()
    }
}

/// Pieces under collection.
#[derive(Debug, Default)]
pub(crate) struct List {
    pub pieces: Vec<Piece>,
}

impl List {
    pub fn whole(&mut self, published: &str, own: &str, size: (usize, usize)) {
        self.either(&[published], own, size);
    }

    pub fn either(&mut self, published: &[&str], own: &str, size: (usize, usize)) {
        self.part(published, own, size, (0, 0), size);
    }

    pub fn part(
        &mut self,
        published: &[&str],
        own: &str,
        matrix: (usize, usize),
        at: (usize, usize),
        size: (usize, usize),
    ) {
        let published = published.iter().map(|name| (*name).to_owned()).collect();
        self.pieces.push(Piece { published, own: own.to_owned(), matrix, at, size });
    }

    /// Scale and, with `shift`, shift of a norm over `d` numbers.
    pub fn norm_pieces(&mut self, published: &str, own: &str, d: usize, shift: bool) {
        self.whole(&format!("{published}.weight"), &format!("{own}.scale"), (1, d));
        if shift {
            self.whole(&format!("{published}.bias"), &format!("{own}.shift"), (1, d));
        }
    }

    /// The encoder of an observation of one leaf.
    pub fn encoder(&mut self, encoder: &Encoder, d: usize) {
        let Some((convolutions, features)) = encoder.convolved() else {
            self.whole("state_encoder.weight", "encoder.weight", (d, encoder.len()));
            return self.whole("state_encoder.bias", "encoder.bias", (1, d));
        };
        // The encoder as a sequence: convolution, ReLU, ..., flatten, linear, tanh.
        for (i, (outputs, depth)) in convolutions.into_iter().enumerate() {
            let (from, to) = (format!("state_encoder.{}", 2 * i), format!("encoder.conv{i}"));
            self.whole(&format!("{from}.weight"), &format!("{to}.weight"), (outputs, depth));
            self.whole(&format!("{from}.bias"), &format!("{to}.bias"), (1, outputs));
        }
        self.whole("state_encoder.7.weight", "encoder.weight", (d, features));
        self.whole("state_encoder.7.bias", "encoder.bias", (1, d));
    }

    /// Hidden layers of these widths over inputs of width `inputs`, published as a sequence of linear maps and
    /// activations. Returns the width of the last.
    pub fn mlp(&mut self, published: &str, own: &str, mut inputs: usize, widths: &[usize]) -> usize {
        for (i, width) in widths.iter().enumerate() {
            let (from, to) = (format!("{published}.{}", 2 * i), format!("{own}.{i}"));
            self.whole(&format!("{from}.weight"), &format!("{to}.weight"), (*width, inputs));
            self.whole(&format!("{from}.bias"), &format!("{to}.bias"), (1, *width));
            inputs = *width;
        }
        inputs
    }

    /// The embedding of actions.
    pub fn action_encoder(&mut self, action: &Action, d: usize) {
        match action {
            Action::Continuous { dim, .. } => {
                self.whole("action_embeddings.0.weight", "action_encoder.weight", (d, *dim));
                self.whole("action_embeddings.0.bias", "action_encoder.bias", (1, d));
            }
            action => {
                let rows = action.outputs() + 1;
                self.whole("action_embeddings.0.weight", "action_encoder.0.table", (rows, d));
            }
        }
    }

    /// The embedding of returns.
    pub fn return_encoder(&mut self, d: usize) {
        self.whole("ret_emb.weight", "return_encoder.weight", (d, 1));
        self.whole("ret_emb.bias", "return_encoder.bias", (1, d));
    }

    /// The head over states of width `d`.
    pub fn head(&mut self, action: &Action, d: usize) {
        let outputs = action.outputs();
        if matches!(action, Action::Continuous { tanh: true, .. }) {
            self.either(&["head.0.weight", "head.weight"], "head.weight", (outputs, d));
            self.either(&["head.0.bias", "head.bias"], "head.bias", (1, outputs));
        } else {
            self.whole("head.weight", "head.weight", (outputs, d));
        }
    }
}

/// Our parameters from published ones, by our names. Missing, misshapen and unknown tensors that are not
/// `spare` are errors that name them.
pub(crate) fn convert_pieces(
    pieces: &[Piece],
    published: &Tensors,
    prefix: &str,
    spare: impl Fn(&str) -> bool,
) -> Result<Vec<(String, Vec<f64>)>> {
    let mut own: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut used = BTreeSet::new();
    for piece in pieces {
        let found = piece.published.iter().find_map(|name| {
            let full = format!("{prefix}{name}");
            published.get(&full).map(|tensor| (full, tensor))
        });
        let Some((name, tensor)) = found else {
            return Err(Error::input(
                "published weights",
                format!("a tensor `{}`", piece.published[0]),
                "none",
            ));
        };
        // A matrix row by row; vectors have one row, convolutions fold what follows the first axis.
        let (rows, columns) = match tensor.shape.split_first() {
            Some((rows, rest)) if !rest.is_empty() => (*rows, rest.iter().product()),
            _ => (1, tensor.shape.iter().product()),
        };
        if (rows, columns) != piece.size {
            let expected = format!("`{name}` of {} x {}", piece.size.0, piece.size.1);
            return Err(Error::input("published weights", expected, format!("{:?}", tensor.shape)));
        }
        let target =
            own.entry(piece.own.clone()).or_insert_with(|| vec![0.0; piece.matrix.0 * piece.matrix.1]);
        piece.insert(&tensor.to_f64(), target);
        used.insert(name);
    }
    let mut names = published.keys().filter(|name| name.starts_with(prefix));
    let unknown = names.find(|name| !used.contains(*name) && !spare(name));
    if let Some(name) = unknown {
        return Err(Error::input(
            "published weights",
            "only tensors that this config has",
            format!("`{name}`"),
        ));
    }
    Ok(own.into_iter().collect())
}
