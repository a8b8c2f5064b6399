//! The plans of a session's rows: what each row will do next, and the planner that makes more.

use super::RowState;
use super::choose::Draws;
use super::history::{History, Shown};
use crate::error::{Error, Result};
use crate::planner::{Planner, Recent};
use crate::tensors::{HostTensor, TensorData, Tensors};

/// Names of the tensors of a snapshot that hold plans, and how many actions of each have been played.
pub(super) const PLANS: &str = "plan.actions";
pub(super) const PLAYED: &str = "plan.played";

/// The plans of all rows.
#[derive(Debug)]
pub(super) struct Plans {
    planner: Box<dyn Planner>,
    looks_back: usize,
    plays: usize,
    outputs: usize,
    /// [rows, plays, outputs]
    actions: Vec<f32>,
    /// Actions of each row's plan that have been played; all of them where a plan is wanted.
    played: Vec<usize>,
    // Buffers of one call.
    wanting: Vec<usize>,
    shown: Vec<Shown>,
    draws: Vec<Draws>,
    made: Vec<f32>,
}

impl Plans {
    pub fn new(planner: Box<dyn Planner>, rows: usize, outputs: usize) -> Result<Self> {
        let (looks_back, plays) = (planner.looks_back(), planner.plays());
        let numbers = rows.saturating_mul(plays).saturating_mul(outputs);
        if looks_back == 0 || plays == 0 || numbers > 1 << 32 {
            let expected = "a planner that looks back on and plays at least one step, for fewer rows";
            return Err(Error::input("session", expected, format!("{looks_back} and {plays} for {rows}")));
        }
        Ok(Self {
            planner,
            looks_back,
            plays,
            outputs,
            actions: vec![0.0; numbers],
            played: vec![plays; rows],
            wanting: Vec::new(),
            shown: Vec::new(),
            draws: Vec::new(),
            made: Vec::new(),
        })
    }

    pub fn looks_back(&self) -> usize {
        self.looks_back
    }

    /// Forgets a row's plan.
    pub fn clear(&mut self, row: usize) {
        self.played[row] = self.plays;
        let each = self.plays * self.outputs;
        self.actions[row * each..(row + 1) * each].fill(0.0);
    }

    /// Plans for the listed rows that have none left, given times and random numbers of all rows.
    pub fn make(
        &mut self,
        rows: &[usize],
        times: &[u64],
        history: &History,
        states: &mut [RowState],
    ) -> Result<()> {
        self.wanting.clear();
        self.wanting.extend(rows.iter().copied().filter(|row| self.played[*row] == self.plays));
        if self.wanting.is_empty() {
            return Ok(());
        }
        let shown = |row: &usize| {
            let count = (times[*row] + 1).min(self.looks_back as u64);
            Shown { row: *row, start: times[*row] + 1 - count, count: count as usize }
        };
        self.shown.clear();
        self.shown.extend(self.wanting.iter().map(shown));
        self.draws.clear();
        self.draws.extend(self.wanting.iter().map(|row| states[*row].draws));
        let each = self.plays * self.outputs;
        self.made.clear();
        self.made.resize(self.wanting.len() * each, 0.0);
        let recent = Recent { history, shown: &self.shown };
        self.planner.plan(&recent, &mut self.draws, &mut self.made)?;
        if !self.made.iter().all(|x| x.is_finite()) {
            return Err(Error::input("policy", "a plan of finite numbers", "others; reset these rows"));
        }
        for ((row, new), made) in self.wanting.iter().zip(&self.draws).zip(self.made.chunks_exact(each)) {
            states[*row].draws = *new;
            self.actions[row * each..(row + 1) * each].copy_from_slice(made);
            self.played[*row] = 0;
        }
        Ok(())
    }

    /// The next action of a row's plan, [outputs].
    pub fn next(&self, row: usize) -> &[f32] {
        let at = row * self.plays + self.played[row].min(self.plays - 1);
        &self.actions[at * self.outputs..(at + 1) * self.outputs]
    }

    /// Goes on to the action after the next.
    pub fn advance(&mut self, row: usize) {
        self.played[row] = (self.played[row] + 1).min(self.plays);
    }

    /// The plan of a row, [plays, outputs].
    pub fn of(&self, row: usize) -> &[f32] {
        let each = self.plays * self.outputs;
        &self.actions[row * each..(row + 1) * each]
    }

    /// Axes of one plan.
    pub fn shape(&self) -> Vec<usize> {
        vec![self.plays, self.outputs]
    }

    /// Adds the plans of these rows to a snapshot.
    pub fn save(&self, rows: &[usize], tensors: &mut Tensors) {
        let actions = rows.iter().flat_map(|row| self.of(*row)).copied().collect();
        let shape = vec![rows.len(), self.plays, self.outputs];
        tensors.insert(PLANS.to_owned(), HostTensor { shape, data: TensorData::F32(actions) });
        let played = TensorData::I64(rows.iter().map(|row| self.played[*row] as i64).collect());
        tensors.insert(PLAYED.to_owned(), HostTensor { shape: vec![rows.len()], data: played });
    }

    /// Whether a snapshot's tensors are plans of this session.
    pub fn takes(&self, actions: &TensorData, played: &TensorData) -> bool {
        let (TensorData::F32(actions), TensorData::I64(played)) = (actions, played) else { return false };
        let known = |n: &i64| (0..=self.plays as i64).contains(n);
        actions.iter().all(|x| x.is_finite()) && played.iter().all(known)
    }

    /// Puts plans of a snapshot, which [`Plans::takes`] has accepted, into these rows.
    pub fn restore(&mut self, rows: &[usize], actions: &TensorData, played: &TensorData) {
        let (TensorData::F32(actions), TensorData::I64(played)) = (actions, played) else { return };
        let each = self.plays * self.outputs;
        for (i, row) in rows.iter().enumerate() {
            let from = i * each..(i + 1) * each;
            self.actions[row * each..(row + 1) * each].copy_from_slice(&actions[from]);
            self.played[*row] = played[i] as usize;
        }
    }
}
