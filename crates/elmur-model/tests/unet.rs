//! Diffusion Policy's U-Net against plain loops.

#![allow(clippy::unwrap_used)]

mod common;

use elmur_engine::rng::{Stream, unit};
use elmur_engine::{AdamW, DType, Pool, Store};
use elmur_model::baselines::{Denoiser, Diffusion};
use elmur_model::ends::*;
use elmur_model::window::{Begin, TrainSettings, WindowProgram, training_graph};
use elmur_model::{init, presets};

use common::random;

/// A chunk or a state of the U-Net as [channels][steps].
type Signal = Vec<Vec<f64>>;

/// The U-Net as plain loops over channels and steps, from the formulas of the paper's description.
struct Reference<'a> {
    store: &'a Store,
    kernel: usize,
    groups: usize,
    /// mish of the condition.
    cond: Vec<f64>,
}

fn mish(x: f64) -> f64 {
    x * x.exp().ln_1p().tanh()
}

impl Reference<'_> {
    fn get(&self, name: &str) -> Vec<f64> {
        self.store.get::<f64>(name).unwrap()
    }

    /// weight [outputs, kernel, inputs]
    fn conv(&self, name: &str, x: &Signal, kernel: usize, stride: usize) -> Signal {
        let (w, b) = (self.get(&format!("{name}.weight")), self.get(&format!("{name}.bias")));
        let (inputs, steps, padding) = (x.len(), x[0].len(), kernel / 2);
        let at = |o: usize, t: usize| {
            let mut sum = b[o];
            for p in (0..kernel).filter(|p| (padding..steps + padding).contains(&(t * stride + p))) {
                sum += (0..inputs)
                    .map(|c| w[(o * kernel + p) * inputs + c] * x[c][t * stride + p - padding])
                    .sum::<f64>();
            }
            sum
        };
        (0..b.len()).map(|o| (0..steps / stride).map(|t| at(o, t)).collect()).collect()
    }

    fn block(&self, name: &str, x: &Signal, groups: usize) -> Signal {
        let mut y = self.conv(&format!("{name}.conv"), x, self.kernel, 1);
        let (scale, shift) =
            (self.get(&format!("{name}.norm.scale")), self.get(&format!("{name}.norm.shift")));
        let width = y.len() / groups;
        for (group, channels) in y.chunks_mut(width).enumerate() {
            let all: Vec<f64> = channels.concat();
            let mean = all.iter().sum::<f64>() / all.len() as f64;
            let variance = all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / all.len() as f64;
            for (c, channel) in channels.iter_mut().enumerate() {
                let c = group * width + c;
                let normed = |x: f64| (x - mean) / (variance + 1e-5).sqrt() * scale[c] + shift[c];
                channel.iter_mut().for_each(|x| *x = mish(normed(*x)));
            }
        }
        y
    }

    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let (w, b) = (self.get(&format!("{name}.weight")), self.get(&format!("{name}.bias")));
        let row = |(w, b): (&[f64], &f64)| b + w.iter().zip(x).map(|(w, x)| w * x).sum::<f64>();
        w.chunks(x.len()).zip(&b).map(row).collect()
    }

    fn residual(&self, name: &str, x: &Signal) -> Signal {
        let mut h = self.block(&format!("{name}.0"), x, self.groups);
        let film = self.linear(&format!("{name}.film"), &self.cond);
        let width = h.len();
        for (c, channel) in h.iter_mut().enumerate() {
            channel.iter_mut().for_each(|x| *x = film[c] * *x + film[width + c]);
        }
        let mut h = self.block(&format!("{name}.1"), &h, self.groups);
        let skip = if x.len() == width { x.clone() } else { self.conv(&format!("{name}.skip"), x, 1, 1) };
        for (h, skip) in h.iter_mut().flatten().zip(skip.iter().flatten()) {
            *h += skip;
        }
        h
    }

    /// weight [4, outputs, inputs]
    fn double(&self, name: &str, x: &Signal) -> Signal {
        let (w, b) = (self.get(&format!("{name}.weight")), self.get(&format!("{name}.bias")));
        let (width, steps) = (x.len(), x[0].len());
        let mut y: Signal = b.iter().map(|b| vec![*b; 2 * steps]).collect();
        for (t, p) in (0..steps).flat_map(|t| (0..4).map(move |p| (t, p))) {
            let Some(u) = (2 * t + p).checked_sub(1).filter(|u| *u < 2 * steps) else { continue };
            for o in 0..width {
                y[o][u] += (0..width).map(|c| w[(p * width + o) * width + c] * x[c][t]).sum::<f64>();
            }
        }
        y
    }

    fn predict(&self, mut x: Signal, levels: usize) -> Signal {
        let mut kept = Vec::new();
        for i in 0..levels {
            x = self.residual(&format!("down.{i}.0"), &x);
            x = self.residual(&format!("down.{i}.1"), &x);
            kept.push(x.clone());
            if i + 1 < levels {
                x = self.conv(&format!("down.{i}.halve"), &x, 3, 2);
            }
        }
        x = self.residual("mid.0", &x);
        x = self.residual("mid.1", &x);
        for i in 0..levels - 1 {
            x.extend(kept.pop().unwrap());
            x = self.residual(&format!("up.{i}.0"), &x);
            x = self.residual(&format!("up.{i}.1"), &x);
            x = self.double(&format!("up.{i}.double"), &x);
        }
        let x = self.block("last", &x, 8);
        self.conv("out", &x, 1, 1)
    }
}

/// Noise is drawn, added and seen as the formulas say, for other sizes than those of the golden trace.
#[test]
fn the_u_net_is_its_formula_at_any_size() {
    let seen = vec![Encoder::Vector { dim: 2, bytes: false }];
    let base = presets::diffusion(seen, Action::Continuous { dim: 3, tanh: false });
    let settings = TrainSettings {
        batch: 2,
        label_smoothing: 0.0,
        ties: false,
        optimizer: AdamW::default(),
        clip: 1e9,
        dtype: DType::F64,
        export_gradients: false,
        dropout: true,
        table: None,
        augment: Default::default(),
        bytes: Vec::new(),
        weights: None,
    };
    for (widths, kernel, groups, obs_horizon, steps) in
        [(vec![8, 16, 12], 3, 4, 3, 12), (vec![16], 7, 8, 1, 5), (vec![8, 4, 4, 8], 1, 2, 2, 8)]
    {
        let levels = widths.len();
        let config = Diffusion {
            obs_horizon,
            pred_horizon: steps,
            act_horizon: 1,
            diffusion_steps: 20,
            step_embed: 6,
            denoiser: Denoiser::Unet { widths, kernel, groups },
            ..base.clone()
        };
        let built = training_graph(&config, &settings, Begin::Fresh).unwrap();
        let store = Store::new();
        store.declare(&built.graph).unwrap();
        init::initialise(&built, &store, 1).unwrap();
        // Norms start as identities, which would hide where scale and shift go.
        for name in built.params.keys().filter(|name| name.contains(".norm.")) {
            let mut data = store.get::<f64>(name).unwrap();
            data.iter_mut().enumerate().for_each(|(i, x)| *x += 0.1 * i as f64 - 0.3);
            store.set(name, &data).unwrap();
        }
        store.set("rng", &[77i64, 5]).unwrap();
        let mut program = WindowProgram::new(&built, &config, &Pool::new(1), &[&store]).unwrap();
        let wide = |n, seed| random(n, seed).into_iter().map(f64::from).collect::<Vec<_>>();
        let (seen, actions) = (wide(2 * steps * 2, 1), wide(2 * steps * 3, 2));
        program.program.set("observation", &seen).unwrap();
        program.program.set("targets", &actions).unwrap();
        program.program.set("mask", &vec![true; 2 * steps]).unwrap();
        program.set_rates(0.0, 0).unwrap();
        program.run(0).unwrap();
        let got = program.program.get::<f64>("logits").unwrap();

        let mut noise = vec![0.0; 2 * steps * 3];
        Stream::new(77, 5, 1).fill_normal(&mut noise, 1.0);
        let share = |u: f64| ((u + 0.008) / 1.008 * std::f64::consts::FRAC_PI_2).cos().powi(2);
        let left = |t: usize| {
            (0..=t)
                .map(|s| (share((s + 1) as f64 / 20.0) / share(s as f64 / 20.0)).max(0.001))
                .product::<f64>()
        };
        let mut squares = 0.0;
        for row in 0..2 {
            let t = (20.0 * unit(Stream::new(77, 5, 0).draw(row as u64))) as usize;
            let at = |a: usize, h: usize| (row * steps + h) * 3 + a;
            let noisy = |a: usize, h: usize| {
                left(t).sqrt() * actions[at(a, h)] + (1.0 - left(t)).sqrt() * noise[at(a, h)]
            };
            let x: Signal = (0..3).map(|a| (0..steps).map(|h| noisy(a, h)).collect()).collect();
            let angles = [0, 1, 2].map(|k| t as f64 * 10_000f64.powf(-(k as f64) / 2.0));
            let embedded: Vec<f64> =
                angles.iter().map(|x| x.sin()).chain(angles.iter().map(|x| x.cos())).collect();
            let mut reference = Reference { store: &store, kernel, groups, cond: Vec::new() };
            let hidden: Vec<f64> = reference.linear("step.0", &embedded).into_iter().map(mish).collect();
            let mut cond = reference.linear("step.1", &hidden);
            cond.extend(&seen[row * steps * 2..][..obs_horizon * 2]);
            reference.cond = cond.into_iter().map(mish).collect();
            let want = reference.predict(x, levels);
            for (a, h) in (0..3).flat_map(|a| (0..steps).map(move |h| (a, h))) {
                let error = (got[at(a, h)] - want[a][h]).abs();
                assert!(error < 1e-12, "{levels} levels, row {row}: {} {}", got[at(a, h)], want[a][h]);
                squares += (want[a][h] - noise[at(a, h)]).powi(2);
            }
        }
        let loss = program.program.get::<f64>("loss").unwrap()[0];
        assert!((loss - squares / noise.len() as f64).abs() < 1e-12, "{loss}");
    }
}
