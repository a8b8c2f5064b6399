//! Golden cases of Trajectory Transformer, whose traces begin with tokens.

use elmur_engine::{DType, Device, Value};
use serde::Deserialize;

use super::super::{Case, Fresh, Replay, Report, compare, golden};
use super::{Common, parse};
use crate::architecture::{Architecture, Group};
use crate::baselines::{Tt, TtPlan};
use crate::ends::Ends;
use crate::error::{Error, Result};
use crate::net::{Loss, Net};
use crate::phase::Window;
use crate::pieces::List;
use crate::policy::PolicyConfig;
use crate::tensors::Tensors;
use crate::window::{Begin, WindowProgram};

#[derive(Debug, Deserialize)]
struct Arguments {
    bins: usize,
    transitions: usize,
    n_head: usize,
    n_layer: usize,
    action_weight: f64,
    reward_weight: f64,
    value_weight: f64,
}

/// The policy as its traces see it: tokens in, logits of the next token out.
#[derive(Debug)]
struct Traced(Tt);

impl Traced {
    /// Tokens of a window, i32 [rows, transitions * D].
    fn tokens(&self, net: &mut Net<'_>) -> Result<Value> {
        match net.g.find("tokens") {
            Some(tokens) => Ok(tokens),
            None => Ok(net.g.input("tokens", DType::I32, [net.rows(), self.0.inputs() + 1])?),
        }
    }
}

impl Architecture for Traced {
    fn validate(&self) -> Result<()> {
        self.0.validate_network()
    }

    fn ends(&self) -> Ends<'_> {
        self.0.ends()
    }

    fn window(&self) -> Window {
        self.0.window()
    }

    fn forward(&self, net: &mut Net<'_>) -> Result<Value> {
        let tokens = self.tokens(net)?;
        self.0.next_logits(net, tokens)
    }

    /// Logits of all tokens but the first, [rows, tokens, N + 1].
    fn head(&self, net: &mut Net<'_>, hidden: Value) -> Result<Value> {
        let (read, outputs) = (self.0.inputs(), self.0.vocabulary().stop() + 1);
        let logits = net.g.reshape(hidden, [net.rows(), read + 1, outputs])?;
        Ok(net.g.slice(logits, 1, 0..read)?)
    }

    fn loss(&self, net: &mut Net<'_>, hidden: Value, _: Value) -> Result<Loss> {
        let (tokens, vocabulary, read) = (self.tokens(net)?, self.0.vocabulary(), self.0.inputs());
        let mask = net.g.input("mask", net.dtype, [net.rows(), read])?;
        let weight = |i: usize| self.0.weight(&vocabulary, (i + 1) % vocabulary.per_transition());
        let weights: Vec<f64> = (0..read).map(weight).collect();
        let weights = net.float_constant(&weights, [1, read])?;
        let weights = net.g.mul(mask, weights)?;
        let action = self.0.next_token_loss(net, hidden, tokens, weights)?;
        Ok(Loss { action, auxiliary: None, correct: None })
    }

    fn group(&self, parameter: &str) -> Group {
        self.0.group(parameter)
    }
}

/// Replays a trace.
pub(in super::super) fn verify(json: &str, file: &Tensors, dtype: DType, device: &Device) -> Result<Report> {
    let (common, arguments): (Common, Arguments) = (parse(json)?, parse(json)?);
    let config = config(&common, &arguments);
    let traced = Traced(config.clone());
    traced.validate()?;
    let (batch, windows, inputs) = (common.batch, common.segments, config.inputs());
    for (name, each) in [("input/tokens", inputs + 1), ("input/mask", inputs)] {
        let expected = windows.saturating_mul(batch).saturating_mul(each);
        let found = golden(file, name)?.len();
        if windows == 0 || batch == 0 || found != expected {
            let expected = format!("{expected} numbers in `{name}`, at least one segment and row");
            return Err(Error::input("golden case of tt", expected, found.to_string()));
        }
    }
    let case = Case {
        outputs: Vec::new(),
        targets: false,
        pieces: pieces(&config).pieces,
        config: PolicyConfig::Tt(config),
        batch,
        windows,
        optimizer: common.optimizer,
        fresh: Fresh::None,
        acted: Vec::new(),
        states: Vec::new(),
        gradient_window: 0,
        gradients: "grad/param/",
        losses: Vec::new(),
        through: None,
        divides_by_more: false,
        spare: Box::new(|_| false),
    };
    let replay = Replay { case: &case, file, dtype, device };
    let mut report = Report::default();
    evaluation(&replay, &traced, &mut report)?;
    training(&replay, &traced, &mut report)?;
    Ok(report)
}

fn config(common: &Common, a: &Arguments) -> Tt {
    Tt {
        observation: common.observation(),
        action: common.action(),
        d_model: common.d_model,
        heads: a.n_head,
        layers: a.n_layer,
        window: a.transitions,
        bins: a.bins,
        dropout: 0.0,
        discount: 0.99,
        terminal_reward: None,
        action_weight: a.action_weight,
        reward_weight: a.reward_weight,
        value_weight: a.value_weight,
        plan: TtPlan { context: 1, beam: 1, expansion: 1, horizon: 1, action_cdf: 0.0 },
    }
}

fn pieces(config: &Tt) -> List {
    let (d, vocabulary) = (config.d_model, config.vocabulary());
    let (each, stop) = (vocabulary.per_transition(), vocabulary.stop());
    let mut list = List::default();
    list.whole("tok_emb.weight", "embedding", (stop * each + 1, d));
    // Published with an axis of extent 1 in front.
    list.whole("pos_emb", "positions", (1, config.inputs() * d));
    list.whole("head.weight", "head.weight", (each, (stop + 1) * d));
    list.norm_pieces("ln_f", "norm", d, true);
    for layer in 0..config.layers {
        let (theirs, ours) = (format!("blocks.{layer}"), format!("layers.{layer}"));
        for (i, part) in ["query", "key", "value"].into_iter().enumerate() {
            let own = format!("{ours}.attention.qkv");
            let name = format!("{theirs}.attn.{part}");
            list.part(&[&format!("{name}.weight")], &format!("{own}.weight"), (3 * d, d), (i * d, 0), (d, d));
            list.part(&[&format!("{name}.bias")], &format!("{own}.bias"), (1, 3 * d), (0, i * d), (1, d));
        }
        for (from, to, outputs, inputs) in [
            ("attn.proj", "attention.out", d, d),
            ("mlp.0", "ffn.up", 4 * d, d),
            ("mlp.2", "ffn.down", d, 4 * d),
        ] {
            let (from, to) = (format!("{theirs}.{from}"), format!("{ours}.{to}"));
            list.whole(&format!("{from}.weight"), &format!("{to}.weight"), (outputs, inputs));
            list.whole(&format!("{from}.bias"), &format!("{to}.bias"), (1, outputs));
        }
        list.norm_pieces(&format!("{theirs}.ln1"), &format!("{ours}.attention.norm"), d, true);
        list.norm_pieces(&format!("{theirs}.ln2"), &format!("{ours}.ffn.norm"), d, true);
    }
    list
}

fn feed(replay: &Replay<'_>, program: &mut WindowProgram, window: usize) -> Result<()> {
    let tokens = replay.window("input/tokens", window)?;
    let tokens: Vec<i32> = tokens.iter().map(|token| *token as i32).collect();
    program.program.set("tokens", &tokens)?;
    if program.program.input_type("mask").is_ok() {
        replay.input(&mut program.program, "mask", &replay.window("input/mask", window)?)?;
        program.set_rates(replay.case.optimizer.lr, window as u64)?;
    }
    Ok(())
}

fn evaluation(replay: &Replay<'_>, traced: &Traced, report: &mut Report) -> Result<()> {
    let built = crate::window::evaluation_graph(traced, replay.case.batch, replay.dtype, Begin::Continue)?;
    let store = replay.store(&[&built])?;
    let mut program = WindowProgram::new(&built, traced, replay.device, &[&store])?;
    for window in 0..replay.case.windows {
        feed(replay, &mut program, window)?;
        program.run(0)?;
        let want = golden(replay.file, &format!("eval/logits.{window}"))?;
        compare(&mut report.logits, &replay.output(&program.program, "logits")?, &want)?;
    }
    Ok(())
}

/// Loss and gradients of the first window, then an AdamW step per window.
fn training(replay: &Replay<'_>, traced: &Traced, report: &mut Report) -> Result<()> {
    let built = replay.training(traced, Begin::Continue)?;
    let store = replay.store(&[&built])?;
    let mut program = WindowProgram::new(&built, traced, replay.device, &[&store])?;
    let trajectory = golden(replay.file, "train/loss_and_grad_norm")?;
    if trajectory.len() != 2 * replay.case.windows {
        let expected = format!("{} numbers in `train/loss_and_grad_norm`", 2 * replay.case.windows);
        return Err(Error::input("golden file", expected, trajectory.len().to_string()));
    }
    for window in 0..replay.case.windows {
        feed(replay, &mut program, window)?;
        program.run(0)?;
        if window == 0 {
            let want = golden(replay.file, "grad/loss")?;
            compare(&mut report.loss, &replay.output(&program.program, "loss")?, &want)?;
            replay.compare_gradients(report, &program.program, replay.case.gradients, 1.0)?;
        }
        for (output, want) in ["loss", "gradient_norm"].into_iter().zip(&trajectory[2 * window..]) {
            compare(&mut report.trajectory, &replay.output(&program.program, output)?, &[*want])?;
        }
    }
    replay.compare_trained(report, &store)
}
