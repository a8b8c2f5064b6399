//! The programs of beam search: sequences read at once, and candidates that grow token by token with their
//! keys and values kept.
//!
//! There are three banks of sequences, each with a cache [rows, tokens, 2d] of keys and values per layer: what
//! is *known* (one row per episode), the candidates that are *kept*, and the continuations that are *tried*.

use elmur_engine::{Activation, Attention, AttentionMask, DType, Device, Graph, Program, Qkv, Store, Value};

use super::network::sees;
use super::{Tt, Vocabulary};
use crate::architecture::Architecture;
use crate::error::{Error, Result};
use crate::net::{Net, Pass};

/// A bank of sequences.
#[derive(Debug, Clone, Copy)]
struct Bank {
    name: &'static str,
    rows: usize,
}

/// The candidates that a step of beam search continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Grown {
    /// Candidates that are kept.
    Kept,
    /// Continuations of candidates, which are tried.
    Tried,
}

/// The compiled programs.
#[derive(Debug)]
pub(super) struct Programs {
    vocabulary: Vocabulary,
    /// Tokens that a cache has room for.
    room: usize,
    /// Tokens of the longest sequence that is read at once.
    longest: usize,
    read_known: Program,
    /// None where no plan outgrows the window.
    read_kept: Option<Program>,
    step_kept: Program,
    step_tried: Program,
    known_to_tried: Program,
    kept_to_tried: Program,
    tried_to_kept: Program,
    /// Rows of the embedding table, for one call.
    rows: Vec<i32>,
}

impl Programs {
    /// Programs for plans of `lanes` episodes side by side.
    pub fn new(config: &Tt, params: &Store, device: &Device, lanes: usize) -> Result<Self> {
        let plan = &config.plan;
        let known = Bank { name: "known", rows: lanes };
        let kept = Bank { name: "kept", rows: lanes * plan.beam };
        let tried = Bank { name: "tried", rows: lanes * plan.beam * plan.expansion };
        let caches = Store::on(device);
        let compile = |graph: Graph| -> Result<Program> {
            caches.declare_states(&graph)?;
            Ok(Program::new(&graph, device, &[params, &caches])?)
        };
        let outgrows = plan.context + plan.horizon > config.window - 1;
        let read_kept = outgrows.then(|| compile(config.read_graph(kept)?)).transpose()?;
        Ok(Self {
            vocabulary: config.vocabulary(),
            room: config.inputs(),
            longest: config.longest_read(),
            read_known: compile(config.read_graph(known)?)?,
            read_kept,
            step_kept: compile(config.step_graph(kept)?)?,
            step_tried: compile(config.step_graph(tried)?)?,
            known_to_tried: compile(config.copy_graph(known, tried)?)?,
            kept_to_tried: compile(config.copy_graph(kept, tried)?)?,
            tried_to_kept: compile(config.copy_graph(tried, kept)?)?,
            rows: Vec::new(),
        })
    }

    /// Reads what is known of every episode, sequences of equal length that end with an observation. Returns
    /// the logits of the token that follows each, [lanes, N + 1].
    pub fn read_known<'t>(&mut self, sequences: impl Iterator<Item = &'t [u32]>) -> Result<&[f32]> {
        let Self { read_known, rows, vocabulary, longest, .. } = self;
        read(read_known, rows, vocabulary, *longest, sequences)
    }

    /// Reads the kept candidates anew, as [`Programs::read_known`] does.
    pub fn read_kept<'t>(&mut self, sequences: impl Iterator<Item = &'t [u32]>) -> Result<&[f32]> {
        let Self { read_kept: Some(program), rows, vocabulary, longest, .. } = self else {
            return Err(Error::input("plan", "a plan that stays in the window", "one that outgrows it"));
        };
        read(program, rows, vocabulary, *longest, sequences)
    }

    /// Appends the token at `position` to every candidate. Returns the logits of the token that follows each,
    /// [candidates, N + 1].
    pub fn step(
        &mut self,
        which: Grown,
        position: usize,
        tokens: impl Iterator<Item = u32>,
    ) -> Result<&[f32]> {
        let program = match which {
            Grown::Kept => &mut self.step_kept,
            Grown::Tried => &mut self.step_tried,
        };
        let (each, room) = (self.vocabulary.per_transition(), self.room);
        let place = position % each;
        let row = |token: u32| self.vocabulary.row(place, token as usize) as i32;
        fill(program.input_mut("tokens")?, tokens.map(row));
        program.set("position", &[position as i32])?;
        program.set("place", &[place as i32])?;
        let at = program.input_mut::<i32>("at")?;
        at.iter_mut().enumerate().for_each(|(row, at)| *at = (row * room + position) as i32);
        let visible = program.input_mut::<bool>("visible")?;
        visible.iter_mut().enumerate().for_each(|(key, visible)| *visible = sees(position, key, each));
        program.run()?;
        Ok(program.get("logits")?)
    }

    /// Makes the tried candidates continuations of rows of what is known (`first`) or of those kept.
    pub fn try_rows(&mut self, first: bool, rows: impl Iterator<Item = usize>) -> Result<()> {
        copy(if first { &mut self.known_to_tried } else { &mut self.kept_to_tried }, rows)
    }

    /// Keeps these of the tried candidates.
    pub fn keep_rows(&mut self, rows: impl Iterator<Item = usize>) -> Result<()> {
        copy(&mut self.tried_to_kept, rows)
    }
}

/// Fills an input with some rows; rows beyond them repeat the last, and nobody looks at what becomes of them.
fn fill(input: &mut [i32], mut values: impl Iterator<Item = i32>) {
    let mut last = 0;
    for to in input {
        last = values.next().unwrap_or(last);
        *to = last;
    }
}

fn copy(program: &mut Program, rows: impl Iterator<Item = usize>) -> Result<()> {
    fill(program.input_mut("rows")?, rows.map(|row| row as i32));
    Ok(program.run()?)
}

fn read<'p, 't>(
    program: &'p mut Program,
    rows: &mut Vec<i32>,
    vocabulary: &Vocabulary,
    longest: usize,
    sequences: impl Iterator<Item = &'t [u32]>,
) -> Result<&'p [f32]> {
    rows.clear();
    let mut last = 0;
    let each = vocabulary.per_transition();
    for sequence in sequences {
        let row = |(i, token): (usize, &u32)| vocabulary.row(i % each, *token as usize) as i32;
        let start = rows.len();
        rows.extend(sequence.iter().enumerate().map(row));
        // Tokens beyond a sequence come later, and no earlier one looks at them.
        rows.resize(start + longest, 0);
        last = sequence.len().saturating_sub(1);
    }
    let input = program.input_mut::<i32>("tokens")?;
    let known = rows.len().min(input.len());
    input[..known].copy_from_slice(&rows[..known]);
    let ends = program.input_mut::<i32>("last")?;
    ends.iter_mut().enumerate().for_each(|(row, end)| *end = (row * longest + last) as i32);
    program.run()?;
    Ok(program.get("logits")?)
}

impl Tt {
    /// Tokens of the longest sequence that is read at once: the context, and an observation.
    fn longest_read(&self) -> usize {
        let vocabulary = self.vocabulary();
        self.plan.context * vocabulary.per_transition() + vocabulary.observation()
    }

    fn net(&self, rows: usize) -> Net<'_> {
        Net::new(self.ends(), DType::F32, Pass::Rerun { closing: false }, rows, self.window)
    }

    /// Keys and values of a layer for the sequences of a bank, [rows, tokens, 2d].
    fn cache(&self, net: &mut Net<'_>, bank: Bank, layer: usize) -> Result<Value> {
        let shape = [bank.rows, self.inputs(), 2 * self.d_model];
        Ok(net.g.state(&format!("{}.{layer}", bank.name), DType::F32, shape)?)
    }

    /// Whole sequences at once: rows of the embedding table, i32 [rows, longest], and where each sequence ends
    /// among the tokens of all rows, i32 `[rows]`, to the logits of what follows an observation's last token.
    fn read_graph(&self, bank: Bank) -> Result<Graph> {
        let (d, rows, count) = (self.d_model, bank.rows, self.longest_read());
        let mut net = self.net(rows);
        let net = &mut net;
        let tokens = net.g.input("tokens", DType::I32, [rows, count])?;
        let table = self.embeddings(net)?;
        let x = net.g.embedding(table, tokens)?;
        let positions = self.positions(net)?;
        let positions = net.g.slice(positions, 0, 0..count)?;
        let x = net.g.add(x, positions)?;
        let mask = self.visible(net, count)?;
        let x = self.blocks(net, x, |net, layer, qkv| {
            let cache = self.cache(net, bank, layer)?;
            let kv = net.g.slice(qkv, 2, d..3 * d)?;
            let rest = net.g.full(DType::F32, [rows, self.inputs() - count, 2 * d], 0.0)?;
            let kv = net.g.concat(&[kv, rest], 1)?;
            net.g.update(cache, kv)?;
            let mask = AttentionMask::Custom(mask);
            let options = Attention { heads: self.heads, mask, ..Attention::default() };
            Ok(net.g.attention(Qkv::Packed(qkv), options)?.0)
        })?;
        let x = net.g.reshape(x, [rows * count, d])?;
        let last = net.g.input("last", DType::I32, [rows])?;
        let x = net.g.gather_rows(x, last)?;
        let place = self.vocabulary().observation() - 1;
        let heads = self.heads_of_places(net)?;
        let head = net.g.slice(heads, 0, place..place + 1)?;
        self.output_logits(net, x, head)
    }

    /// One more token for every sequence of a bank: its row of the embedding table, i32 `[rows]`, its position
    /// and place, and where its keys and values lie among those of all rows, to the logits of what follows.
    fn step_graph(&self, bank: Bank) -> Result<Graph> {
        let (d, rows, room) = (self.d_model, bank.rows, self.inputs());
        let mut net = self.net(rows);
        let net = &mut net;
        let tokens = net.g.input("tokens", DType::I32, [rows])?;
        let table = self.embeddings(net)?;
        let x = net.g.embedding(table, tokens)?;
        let positions = self.positions(net)?;
        let position = net.g.input("position", DType::I32, [1])?;
        let position = net.g.gather_rows(positions, position)?;
        let x = net.g.add(x, position)?;
        let x = net.g.reshape(x, [rows, 1, d])?;
        let at = net.g.input("at", DType::I32, [rows])?;
        let mask = AttentionMask::Custom(net.g.input("visible", DType::Bool, [1, 1, room])?);
        let x = self.blocks(net, x, |net, layer, qkv| {
            let cache = self.cache(net, bank, layer)?;
            let q = net.g.slice(qkv, 2, 0..d)?;
            let kv = net.g.slice(qkv, 2, d..3 * d)?;
            let kv = net.g.reshape(kv, [rows, 2 * d])?;
            let kv = net.g.scatter_rows(cache, at, kv)?;
            net.g.update(cache, kv)?;
            let options = Attention { heads: self.heads, mask, ..Attention::default() };
            Ok(net.g.attention(Qkv::QueryAndPacked { q, kv }, options)?.0)
        })?;
        let x = net.g.reshape(x, [rows, d])?;
        let heads = self.heads_of_places(net)?;
        let place = net.g.input("place", DType::I32, [1])?;
        let head = net.g.gather_rows(heads, place)?;
        self.output_logits(net, x, head)
    }

    /// Adds the output `logits` [rows, N + 1] of x [rows, d] by a head [1, N + 1, d].
    fn output_logits(&self, net: &mut Net<'_>, x: Value, head: Value) -> Result<Graph> {
        let head = net.g.reshape(head, [self.vocabulary().stop() + 1, self.d_model])?;
        let logits = net.g.linear(x, head, None, Activation::Identity)?;
        net.g.output("logits", logits)?;
        Ok(std::mem::take(&mut net.g))
    }

    /// Rows of one bank's caches, i32 `[rows]`, to another's.
    fn copy_graph(&self, from: Bank, to: Bank) -> Result<Graph> {
        let mut net = self.net(to.rows);
        let rows = net.g.input("rows", DType::I32, [to.rows])?;
        for layer in 0..self.layers {
            let (from, to) = (self.cache(&mut net, from, layer)?, self.cache(&mut net, to, layer)?);
            let copied = net.g.gather_rows(from, rows)?;
            net.g.update(to, copied)?;
        }
        Ok(net.g)
    }
}

#[cfg(test)]
mod tests {
    use elmur_engine::Pool;
    use elmur_engine::rng::Stream;

    use super::*;
    use crate::baselines::TtPlan;
    use crate::ends::{Action, Encoder};
    use crate::{init, presets};

    fn small() -> Tt {
        let observation = vec![Encoder::Vector { dim: 2, bytes: false }];
        let base = presets::tt(observation, Action::Categorical { count: 3 });
        let plan = TtPlan { context: 2, beam: 2, expansion: 3, horizon: 9, action_cdf: 0.0 };
        Tt { d_model: 8, heads: 2, layers: 2, window: 5, bins: 4, plan, ..base }
    }

    /// Random weights, positions too.
    fn params(config: &Tt) -> Store {
        let params = init::parameters(config, 1).unwrap();
        let mut positions = vec![0.0; config.inputs() * config.d_model];
        Stream::new(5, 0, 0).fill_normal(&mut positions, 1.0);
        params.set("positions", &positions.iter().map(|x| *x as f32).collect::<Vec<_>>()).unwrap();
        params
    }

    /// Logits of what follows every token of whole transitions, [tokens, N + 1], all computed at once.
    fn whole(config: &Tt, params: &Store, tokens: &[u32]) -> Vec<f32> {
        let mut net = config.net(1);
        let input = net.g.input("tokens", DType::I32, [1, tokens.len()]).unwrap();
        let logits = config.next_logits(&mut net, input).unwrap();
        net.g.output("logits", logits).unwrap();
        let mut program = Program::new(&net.g, &Pool::new(1), &[params]).unwrap();
        program.set("tokens", &tokens.iter().map(|token| *token as i32).collect::<Vec<_>>()).unwrap();
        program.run().unwrap();
        program.get::<f32>("logits").unwrap().to_vec()
    }

    fn close(got: &[f32], want: &[f32], what: &str) {
        for (g, w) in got.iter().zip(want) {
            assert!((g - w).abs() < 1e-5, "{what}: {got:?}, want {want:?}");
        }
    }

    #[test]
    fn growing_token_by_token_equals_reading_at_once() {
        let config = small();
        let params = params(&config);
        let vocabulary = config.vocabulary();
        let (each, stop) = (vocabulary.per_transition(), vocabulary.stop());
        assert_eq!((each, stop), (5, 4));
        // Two sequences of five transitions; the second ends after three.
        let size = |i: usize| vocabulary.size(i % each);
        let first: Vec<u32> = (0..5 * each).map(|i| (i * i % size(i)) as u32).collect();
        let second: Vec<u32> =
            (0..5 * each).map(|i| if i < 3 * each { (i % 2) as u32 } else { stop as u32 }).collect();
        let want: Vec<Vec<f32>> = [&first, &second].map(|s| whole(&config, &params, s)).to_vec();
        let mut programs = Programs::new(&config, &params, &Device::from(&Pool::new(1)), 2).unwrap();
        let known = 2 * each + 2;
        let at = |sequence: usize, i: usize| &want[sequence][i * (stop + 1)..(i + 1) * (stop + 1)];
        let got = programs.read_known([&first[..known], &second[..known]].into_iter()).unwrap();
        close(&got[..5], at(0, known - 1), "known");
        close(&got[5..], at(1, known - 1), "known");
        // All twelve that are tried: six of each; then kept: the first, the second, the first, the second.
        programs.try_rows(true, (0..12).map(|i| i / 6)).unwrap();
        let mut position = known;
        for _ in 0..3 {
            let tokens = (0..12).map(|i| if i < 6 { first[position] } else { second[position] });
            let got = programs.step(Grown::Tried, position, tokens).unwrap().to_vec();
            for (i, got) in got.chunks_exact(stop + 1).enumerate() {
                close(got, at(i / 6, position), "tried");
            }
            position += 1;
        }
        programs.keep_rows([5, 6, 0, 11].into_iter()).unwrap();
        while position < 4 * each + 2 {
            let tokens = (0..4).map(|i| if i % 2 == 0 { first[position] } else { second[position] });
            let got = programs.step(Grown::Kept, position, tokens).unwrap().to_vec();
            for (i, got) in got.chunks_exact(stop + 1).enumerate() {
                close(got, at(i % 2, position), "kept");
            }
            position += 1;
        }
        // The newest two transitions and the observation, read anew by themselves.
        let tail = |s: &[u32]| s[2 * each..4 * each + 2].to_vec();
        let tails = [tail(&first), tail(&second)];
        let got = programs.read_kept((0..4).map(|i| &tails[i % 2][..])).unwrap().to_vec();
        for (i, got) in got.chunks_exact(stop + 1).enumerate() {
            let mut padded = tails[i % 2].clone();
            padded.resize(3 * each, 0);
            let alone = whole(&config, &params, &padded);
            close(got, &alone[(2 * each + 1) * (stop + 1)..][..stop + 1], "read anew");
        }
    }
}
