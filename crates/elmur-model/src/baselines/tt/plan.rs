//! Acting by beam search through what a Trajectory Transformer expects.
//!
//! ```text
//! sequence = the last transitions and the current observation, as tokens
//! repeat for every step of the horizon:
//!     try each candidate several times: draw action tokens, the least likely left out
//!     expect reward r_t and value V_t (means over their bins);  score = sum_(i<=t) gamma^i r_i + gamma^(t+1) V_t
//!     keep the best;  go on with the likeliest next observation
//! the first action of the best sequence is played
//! ```
//!
//! Where sequences would outgrow the window that the network was trained on, the oldest transitions leave and
//! the newest, as many as the context has, are read anew. A sequence that predicts the end of its episode
//! earns no more.

use elmur_base::{Field, FieldMut};
use elmur_engine::{Device, Store};

use super::programs::{Grown, Programs};
use super::{Tt, Vocabulary, bins_name};
use crate::ends::Encoder;
use crate::error::{Error, Result};
use crate::planner::{Planner, Recent};
use crate::session::Draws;

/// Logit of the choices that a plan does not take; the one that it takes has 0.
const NEVER: f32 = -1e4;

/// Most episodes that are planned side by side on a GPU. The CPU plans one after the other, as the candidates of one
/// fill a batch.
const MOST_LANES: usize = 64;

/// Most numbers in the caches of all episodes that are planned side by side.
const MOST_CACHED: usize = 1 << 28;

/// Beam search, for the rows of a session.
#[derive(Debug)]
pub(super) struct BeamPlanner {
    config: Tt,
    vocabulary: Vocabulary,
    params: Store,
    device: Device,
    /// Episodes that are planned side by side.
    lanes: usize,
    /// Compiled when the first plan is made.
    programs: Option<Programs>,
}

/// A sequence of tokens under consideration.
#[derive(Debug, Clone, Default)]
struct Candidate {
    /// All tokens in the window.
    tokens: Vec<u32>,
    /// Tokens of the first action that was planned.
    first: Vec<u32>,
    /// Discounted rewards so far.
    total: f64,
    /// Rewards so far and the value of what follows.
    score: f64,
    /// The episode is expected to have ended.
    ended: bool,
}

impl Planner for BeamPlanner {
    fn looks_back(&self) -> usize {
        self.config.plan.context + 1
    }

    fn plays(&self) -> usize {
        1
    }

    fn plan(&mut self, recent: &Recent<'_>, draws: &mut [Draws], plans: &mut [f32]) -> Result<()> {
        let bins = Bins::read(&self.config, &self.params)?;
        let outputs = plans.len() / recent.rows().max(1);
        // Episodes side by side have sequences of one length.
        let mut order: Vec<usize> = (0..recent.rows()).collect();
        order.sort_by_key(|row| recent.count(*row));
        let alike = order.chunk_by(|a, b| recent.count(*a) == recent.count(*b));
        let lanes = self.lanes;
        for rows in alike.flat_map(|rows| rows.chunks(lanes)) {
            let known = rows.iter().map(|row| self.known(recent, *row, &bins));
            let known = known.collect::<Result<Vec<_>>>()?;
            let mut drawn: Vec<Draws> = rows.iter().map(|row| draws[*row]).collect();
            let actions = self.search(known, &mut drawn, &bins)?;
            for ((row, drawn), tokens) in rows.iter().zip(drawn).zip(actions) {
                draws[*row] = drawn;
                self.write(&tokens, &bins, &mut plans[row * outputs..(row + 1) * outputs]);
            }
        }
        Ok(())
    }
}

impl BeamPlanner {
    pub fn new(config: &Tt, params: &Store, device: &Device, rows: usize) -> Result<Self> {
        let (plan, each) = (&config.plan, config.inputs().saturating_mul(2 * config.d_model));
        let sequences = plan.beam.saturating_mul(plan.expansion + 1).saturating_add(1);
        let numbers = each.saturating_mul(config.layers).saturating_mul(sequences);
        if numbers > 4 * MOST_CACHED {
            let expected = "a plan of fewer candidates, for a smaller network or a shorter window";
            let got = format!("{sequences} sequences of {each} numbers in {} layers", config.layers);
            return Err(Error::input("session", expected, got));
        }
        let most = if device.is_cpu() { 1 } else { (MOST_CACHED / numbers.max(1)).clamp(1, MOST_LANES) };
        Ok(Self {
            config: config.clone(),
            vocabulary: config.vocabulary(),
            params: params.clone(),
            device: device.clone(),
            lanes: rows.min(most),
            programs: None,
        })
    }

    /// What is known of a row, as tokens: transitions, and the current observation.
    fn known(&self, recent: &Recent<'_>, row: usize, bins: &Bins) -> Result<Vec<u32>> {
        let count = recent.count(row);
        let mut observed = vec![Vec::new(); count];
        for (leaf, encoder) in self.config.observation.iter().enumerate() {
            let (field, each) = (Field::Observation(leaf), encoder.len());
            let mut floats = vec![0.0; count * each];
            match encoder {
                Encoder::Categorical { .. } => {
                    let mut choices = vec![0; count * each];
                    recent.read(field, row, FieldMut::I32(&mut choices))?;
                    for (step, choices) in observed.iter_mut().zip(choices.chunks_exact(each)) {
                        step.extend(choices.iter().map(|choice| *choice as u32));
                    }
                    continue;
                }
                Encoder::Vector { bytes: true, .. } => {
                    let mut bytes = vec![0; count * each];
                    recent.read(field, row, FieldMut::U8(&mut bytes))?;
                    // As the graph computes it.
                    floats = bytes.into_iter().map(|b| f32::from(b) * (1.0 / 255.0)).collect();
                }
                _ => recent.read(field, row, FieldMut::F32(&mut floats))?,
            }
            for (step, numbers) in observed.iter_mut().zip(floats.chunks_exact(each)) {
                step.extend(bins.tokens(&bins.observation[leaf], numbers));
            }
        }
        let taken = self.taken(recent, row, bins)?;
        let mut returns = vec![0.0; count];
        recent.read(Field::ReturnToGo, row, FieldMut::F32(&mut returns))?;
        let mut tokens = Vec::new();
        for (step, observed) in observed.into_iter().enumerate() {
            tokens.extend(observed);
            if step + 1 < count {
                tokens.extend(&taken[step * self.vocabulary.action()..][..self.vocabulary.action()]);
                tokens.extend(bins.tokens(&bins.reward, &[returns[step] - returns[step + 1]]));
                // The value of what is past is not known, and nothing looks at it.
                tokens.push(0);
            }
        }
        Ok(tokens)
    }

    /// Tokens of the actions that a row has taken, [steps, tokens of an action].
    fn taken(&self, recent: &Recent<'_>, row: usize, bins: &Bins) -> Result<Vec<u32>> {
        let (count, each) = (recent.count(row), self.vocabulary.action());
        if !self.config.action.is_discrete() {
            let mut floats = vec![0.0; count * each];
            recent.read(Field::Action, row, FieldMut::F32(&mut floats))?;
            return Ok(floats.chunks_exact(each).flat_map(|a| bins.tokens(&bins.action, a)).collect());
        }
        let mut choices = vec![0; count * each];
        recent.read(Field::Action, row, FieldMut::I32(&mut choices))?;
        let (sizes, stop) = (self.config.action.sizes(), self.vocabulary.stop() as u32);
        let token = |(choice, size): (&i32, &usize)| match u32::try_from(*choice) {
            Ok(choice) if (choice as usize) < *size => choice,
            _ => stop,
        };
        Ok(choices.iter().zip(sizes.iter().cycle()).map(token).collect())
    }

    /// Writes the action that tokens stand for as a plan of one step.
    fn write(&self, tokens: &[u32], bins: &Bins, plan: &mut [f32]) {
        if !self.config.action.is_discrete() {
            let ends = bins.action.chunks_exact(bins.count + 1);
            for ((to, token), ends) in plan.iter_mut().zip(tokens).zip(ends) {
                *to = Bins::middle(ends, *token as usize) as f32;
            }
            return;
        }
        plan.fill(NEVER);
        let mut first = 0;
        for (token, size) in tokens.iter().zip(self.config.action.sizes()) {
            plan[first + *token as usize] = 0.0;
            first += size;
        }
    }

    /// The tokens of the best first action for each of some sequences of one length, which end with an
    /// observation.
    fn search(&mut self, known: Vec<Vec<u32>>, draws: &mut [Draws], bins: &Bins) -> Result<Vec<Vec<u32>>> {
        let Self { config, vocabulary, params, device, lanes, programs } = self;
        let programs = match programs {
            Some(programs) => programs,
            None => programs.insert(Programs::new(config, params, device, *lanes)?),
        };
        let transitions = known.first().map_or(0, Vec::len) / vocabulary.per_transition();
        let logits = programs.read_known(known.iter().map(Vec::as_slice))?.to_vec();
        let mut kept: Vec<Candidate> =
            known.into_iter().map(|tokens| Candidate { tokens, ..Candidate::default() }).collect();
        let mut search = Search { config, vocabulary, programs, bins, logits, transitions };
        let beam = config.plan.beam;
        for t in 0..config.plan.horizon {
            if t > 0 {
                search.observe(&mut kept)?;
            }
            let mut tried = search.act(t, &kept, draws)?;
            search.expect(t, &mut tried)?;
            let best = best_of_each(&tried, beam * config.plan.expansion, beam)?;
            if t + 1 < config.plan.horizon {
                search.programs.keep_rows(best.iter().copied())?;
            }
            kept = best.iter().map(|i| std::mem::take(&mut tried[*i])).collect();
        }
        Ok(kept.into_iter().step_by(beam).map(|candidate| candidate.first).collect())
    }
}

/// One search, for some episodes side by side.
struct Search<'a> {
    config: &'a Tt,
    vocabulary: &'a Vocabulary,
    programs: &'a mut Programs,
    bins: &'a Bins,
    /// Logits of what follows each candidate, [candidates, N + 1].
    logits: Vec<f32>,
    /// Whole transitions in the window of every candidate.
    transitions: usize,
}

impl Search<'_> {
    /// Appends the newest token of every candidate, at a place of the transition that is growing.
    fn step(&mut self, which: Grown, place: usize, candidates: &[Candidate]) -> Result<()> {
        let position = self.transitions * self.vocabulary.per_transition() + place;
        let newest = candidates.iter().map(|candidate| candidate.tokens.last().copied().unwrap_or(0));
        let logits = self.programs.step(which, position, newest)?;
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        Ok(())
    }

    /// Candidates with their logits.
    fn with_logits<'c>(
        &'c self,
        candidates: &'c mut [Candidate],
    ) -> impl Iterator<Item = (&'c mut Candidate, &'c [f32])> {
        candidates.iter_mut().zip(self.logits.chunks_exact(self.vocabulary.stop() + 1))
    }

    /// Tries every kept candidate (one per episode at first) several times, each with an action drawn for it.
    fn act(&mut self, t: usize, kept: &[Candidate], draws: &mut [Draws]) -> Result<Vec<Candidate>> {
        let (plan, outputs, stop) = (self.config.plan, self.vocabulary.stop() + 1, self.vocabulary.stop());
        let tries = plan.beam * plan.expansion;
        let (from, times) = if t == 0 { (1, tries) } else { (plan.beam, plan.expansion) };
        let parent = |i: usize| i / tries * from + i % tries / times;
        let parents: Vec<usize> = (0..kept.len() / from * tries).map(parent).collect();
        self.programs.try_rows(t == 0, parents.iter().copied())?;
        let mut tried: Vec<Candidate> = parents.iter().map(|parent| kept[*parent].clone()).collect();
        let logits = parents.iter().flat_map(|parent| &self.logits[parent * outputs..(parent + 1) * outputs]);
        self.logits = logits.copied().collect();
        let (first, mut scratch) = (self.vocabulary.observation(), Vec::new());
        for place in first..first + self.vocabulary.action() {
            let size = self.vocabulary.size(place);
            for (i, (candidate, logits)) in self.with_logits(&mut tried).enumerate() {
                let token = if candidate.ended {
                    stop
                } else {
                    draw(&logits[..size], plan.action_cdf, &mut draws[i / tries], &mut scratch)
                };
                candidate.tokens.push(token as u32);
                if t == 0 {
                    candidate.first.push(token as u32);
                }
            }
            self.step(Grown::Tried, place, &tried)?;
        }
        Ok(tried)
    }

    /// Adds the reward that each candidate expects and scores it by the value that it expects to follow.
    fn expect(&mut self, t: usize, tried: &mut [Candidate]) -> Result<()> {
        let (bins, stop, discount) = (self.bins, self.vocabulary.stop(), self.config.discount);
        let now = discount.powi(t as i32);
        for (candidate, logits) in self.with_logits(tried) {
            if !candidate.ended {
                candidate.total += now * bins.mean(&bins.reward, logits);
            }
            candidate.push_likeliest(&logits[..bins.count], stop);
        }
        let place = self.vocabulary.per_transition() - 2;
        self.step(Grown::Tried, place, tried)?;
        for (candidate, logits) in self.with_logits(tried) {
            candidate.score = candidate.total;
            if !candidate.ended {
                candidate.score += now * discount * bins.mean(&bins.value, logits);
            }
            candidate.push_likeliest(&logits[..bins.count], stop);
        }
        Ok(())
    }

    /// Lets every kept candidate go on with the likeliest next observation, or end with its episode.
    fn observe(&mut self, kept: &mut [Candidate]) -> Result<()> {
        let (stop, each, plan) = (self.vocabulary.stop(), self.vocabulary.per_transition(), self.config.plan);
        self.step(Grown::Kept, each - 1, kept)?;
        self.transitions += 1;
        for place in 0..self.vocabulary.observation() {
            let size = self.vocabulary.size(place);
            for (candidate, logits) in self.with_logits(kept) {
                let end = place == 0 && logits[likeliest(&logits[..size])] < logits[stop];
                candidate.ended |= end;
                candidate.push_likeliest(&logits[..size], stop);
            }
            self.step(Grown::Kept, place, kept)?;
        }
        // The next transition, and the observation after it, must fit the window.
        if self.transitions + 1 >= self.config.window {
            let leave = (self.transitions - plan.context) * each;
            kept.iter_mut().for_each(|candidate| drop(candidate.tokens.drain(..leave)));
            self.transitions = plan.context;
            let logits = self.programs.read_kept(kept.iter().map(|c| c.tokens.as_slice()))?;
            self.logits.clear();
            self.logits.extend_from_slice(logits);
        }
        Ok(())
    }
}

impl Candidate {
    /// Goes on with the likeliest token, or with the stop token once the episode has ended.
    fn push_likeliest(&mut self, logits: &[f32], stop: usize) {
        let token = if self.ended { stop } else { likeliest(logits) };
        self.tokens.push(token as u32);
    }
}

/// The first of the largest logits.
fn likeliest(logits: &[f32]) -> usize {
    let mut best = 0;
    for (i, x) in logits.iter().enumerate() {
        if *x > logits[best] {
            best = i;
        }
    }
    best
}

/// Numbers of the `beam` best of every `tries` candidates, the best first; the earlier of equals.
fn best_of_each(tried: &[Candidate], tries: usize, beam: usize) -> Result<Vec<usize>> {
    if let Some(candidate) = tried.iter().find(|candidate| !candidate.score.is_finite()) {
        let got = format!("{}; reset these rows", candidate.score);
        return Err(Error::input("policy", "plans of finite value", got));
    }
    let mut best = Vec::with_capacity(tried.len() / tries * beam);
    for first in (0..tried.len()).step_by(tries) {
        let mut order: Vec<usize> = (first..first + tries).collect();
        order.sort_by(|a, b| tried[*b].score.total_cmp(&tried[*a].score));
        best.extend(&order[..beam]);
    }
    Ok(best)
}

/// A token drawn with the probabilities that logits mean, without the least likely tokens whose probabilities
/// add up to less than `cdf`.
fn draw(logits: &[f32], cdf: f64, draws: &mut Draws, shares: &mut Vec<(f64, usize)>) -> usize {
    let top = logits[likeliest(logits)];
    shares.clear();
    shares.extend(logits.iter().enumerate().map(|(token, x)| (f64::from(x - top).exp(), token)));
    let total: f64 = shares.iter().map(|(share, _)| share).sum();
    // The least likely first; of equally likely ones the later.
    shares.sort_by(|a, b| a.0.total_cmp(&b.0).then(b.1.cmp(&a.1)));
    let (mut dropped, mut below) = (0, 0.0);
    for (share, _) in &shares[..shares.len() - 1] {
        below += share;
        if below >= cdf * total {
            break;
        }
        dropped += 1;
    }
    let shares = &shares[dropped..];
    let mut left = draws.below(shares.iter().map(|(share, _)| share).sum());
    let drawn = shares.iter().find(|(share, _)| {
        left -= share;
        left < 0.0
    });
    drawn.or(shares.last()).map_or(0, |(_, token)| *token)
}

/// Ends of the bins of continuous numbers, each [numbers, bins + 1].
#[derive(Debug)]
struct Bins {
    /// Bins of a number.
    count: usize,
    /// By leaf; empty for choices.
    observation: Vec<Vec<f32>>,
    action: Vec<f32>,
    reward: Vec<f32>,
    value: Vec<f32>,
}

impl Bins {
    /// The bins that a policy's parameters hold.
    fn read(config: &Tt, params: &Store) -> Result<Self> {
        let of = |field: Field| Ok::<_, Error>(params.get::<f32>(&bins_name(field))?);
        let leaf = |(leaf, encoder): (usize, &Encoder)| match encoder {
            Encoder::Categorical { .. } => Ok(Vec::new()),
            _ => of(Field::Observation(leaf)),
        };
        Ok(Self {
            count: config.bins,
            observation: config.observation.iter().enumerate().map(leaf).collect::<Result<_>>()?,
            action: if config.action.is_discrete() { Vec::new() } else { of(Field::Action)? },
            reward: of(Field::CountedReward(config.rewards()))?,
            value: of(Field::LaterRewards(config.rewards()))?,
        })
    }

    /// The tokens of numbers with these bins, as the graph's `discretize` finds them.
    fn tokens<'b>(&self, ends: &'b [f32], numbers: &'b [f32]) -> impl Iterator<Item = u32> + 'b {
        let bins = self.count;
        numbers.iter().zip(ends.chunks_exact(bins + 1)).map(move |(x, ends)| {
            let reached = ends.partition_point(|end| end <= x);
            reached.saturating_sub(1).min(bins - 1) as u32
        })
    }

    /// The number that a token stands for: the middle of its bin.
    fn middle(ends: &[f32], token: usize) -> f64 {
        let token = token.min(ends.len().saturating_sub(2));
        (f64::from(ends[token]) + f64::from(ends[token + 1])) / 2.0
    }

    /// The mean of a number given logits [N + 1] of its token; nothing is expected after the end.
    fn mean(&self, ends: &[f32], logits: &[f32]) -> f64 {
        let stop = logits[logits.len() - 1];
        let top = logits[likeliest(&logits[..self.count])].max(stop);
        let share = |x: f32| f64::from(x - top).exp();
        let (mut total, mut sum) = (share(stop), 0.0);
        for (token, x) in logits[..self.count].iter().enumerate() {
            total += share(*x);
            sum += share(*x) * Self::middle(ends, token);
        }
        sum / total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bins() -> Bins {
        let ends = vec![0.0, 1.0, 2.0, 4.0];
        Bins { count: 3, observation: vec![], action: ends.clone(), reward: ends.clone(), value: ends }
    }

    #[test]
    fn numbers_lie_in_bins_and_tokens_stand_for_their_middles() {
        let bins = bins();
        let token = |x: f32| bins.tokens(&bins.reward, &[x]).next().unwrap();
        let tokens = [-5.0, 0.0, 0.9, 1.0, 1.9, 2.0, 4.0, 9.0].map(token);
        assert_eq!(tokens, [0, 0, 0, 1, 1, 2, 2, 2]);
        assert_eq!([0, 1, 2, 3].map(|token| Bins::middle(&bins.reward, token)), [0.5, 1.5, 3.0, 3.0]);
        // Half of 1.5, a quarter of 3; nothing comes of the quarter that stops.
        let logits = [f32::NEG_INFINITY, 2f32.ln(), 0.0, 0.0];
        assert!((bins.mean(&bins.reward, &logits) - 1.5).abs() < 1e-6);
    }

    #[test]
    fn unlikely_tokens_are_dropped_up_to_their_cumulative_probability() {
        let logits: Vec<f32> = [0.1f32, 0.4, 0.2, 0.3].iter().map(|p| p.ln()).collect();
        let drawn = |cdf: f64| {
            let (mut draws, mut scratch, mut counts) = (Draws::new(3), Vec::new(), [0; 4]);
            (0..4000).for_each(|_| counts[draw(&logits, cdf, &mut draws, &mut scratch)] += 1);
            counts
        };
        let all = drawn(0.0);
        for (count, p) in all.iter().zip([0.1, 0.4, 0.2, 0.3]) {
            assert!((f64::from(*count) - 4000.0 * p).abs() < 120.0, "{all:?}");
        }
        // 0.1 and 0.1 + 0.2 lie below 0.35, 0.1 + 0.2 + 0.3 does not.
        let [none, four, no, three] = drawn(0.35);
        assert_eq!((none, no), (0, 0));
        assert!((f64::from(four) - 4000.0 * 4.0 / 7.0).abs() < 120.0 && four + three == 4000);
        assert_eq!(drawn(0.61), [0, 4000, 0, 0]);
        assert_eq!(drawn(0.999), [0, 4000, 0, 0]);
    }

    #[test]
    fn the_best_candidates_of_each_episode_are_kept() {
        let scored = |score: f64| Candidate { score, ..Candidate::default() };
        let tried = [1.0, 3.0, 2.0, 3.0, -5.0, -4.0, -4.0, -9.0].map(scored);
        assert_eq!(best_of_each(&tried, 4, 2).unwrap(), [1, 3, 5, 6]);
        let error = best_of_each(&[scored(f64::NAN)], 1, 1).unwrap_err().to_string();
        assert!(error.contains("plans of finite value"), "{error}");
    }
}
