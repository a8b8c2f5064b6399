//! A dataset in a device's memory: one row per step, so that a batch is only a list of rows.

use elmur_base::{Field, FieldMut};
use elmur_data::{Crop, Dataset, Window};
use elmur_engine::{DType, Device, Graph, Store};
use elmur_model::ModelConfig;
use elmur_model::config::Observation;

use crate::error::Result;

/// What the names of its tensors begin with.
pub(crate) const PREFIX: &str = "data.";

/// The data's tables, and where each episode begins in them. An episode of T steps has T + 1 rows; the last, for what lies
/// beyond its end, shows its last observation and does not count.
#[derive(Debug)]
pub(crate) struct Resident {
    store: Store,
    starts: Vec<usize>,
}

impl Resident {
    /// Rows of the tables, if the data is to lie on the device: a GPU with room, and a model that takes one token per step.
    pub fn rows(model: &ModelConfig, dataset: &Dataset, device: &Device) -> Option<usize> {
        let rows: usize = (0..dataset.len()).map(|i| dataset.episode(i).steps() + 1).sum();
        let numbers = |observation: &Observation| match observation {
            Observation::Vector { dim } => *dim,
            Observation::Categorical { sizes, .. } => sizes.len(),
            Observation::Image { channels, height, width } => channels * height * width,
            Observation::Parts(_) => 0,
        };
        let observed = match &model.observation {
            Observation::Parts(parts) => parts.iter().map(numbers).sum(),
            one => numbers(one),
        };
        let bytes = rows.checked_mul(4 * observed + 8 * model.action.dim() + 1)?;
        let fits = bytes < device.free_memory()? / 4 && i32::try_from(rows).is_ok();
        (fits && model.tokens.per_step() == 1).then_some(rows)
    }

    /// The tables that `graph` declares, filled.
    pub fn new(graph: &Graph, dataset: &Dataset, device: &Device) -> Result<Self> {
        let store = Store::on(device);
        let mut starts = Vec::with_capacity(dataset.len());
        let mut rows = 0;
        for i in 0..dataset.len() {
            starts.push(rows);
            rows += dataset.episode(i).steps() + 1;
        }
        for (name, value) in graph.states() {
            let Some(what) = name.strip_prefix(PREFIX) else { continue };
            let ty = graph.ty(value)?.clone();
            let each = ty.len() / ty.shape[0];
            store.insert(name, ty.clone())?;
            // Calls `f` with each episode as a window, and the part of the table it fills.
            fn fill<T: Clone + Default>(
                dataset: &Dataset,
                starts: &[usize],
                len: usize,
                each: usize,
                f: impl Fn(Window<'_>, &mut [T]) -> elmur_data::Result<()>,
            ) -> elmur_data::Result<Vec<T>> {
                let mut data = vec![T::default(); len];
                for (episode, start) in starts.iter().enumerate() {
                    let length = dataset.episode(episode).steps() + 1;
                    let crops = [Crop { episode, start: 0 }];
                    let window = Window { dataset, crops: &crops, offset: 0, length };
                    f(window, &mut data[start * each..(start + length) * each])?;
                }
                Ok(data)
            }
            // Part 0 of an observation that has no others is just `observation`.
            let leaf = what.strip_prefix("observation.").and_then(|n| n.parse().ok()).unwrap_or(0);
            match (what, ty.dtype) {
                ("targets", DType::I64) => {
                    let get = |w: Window<'_>, out: &mut [i64]| w.fill(Field::Target, FieldMut::I64(out));
                    store.set(name, &fill(dataset, &starts, ty.len(), each, get)?)?;
                }
                ("targets", _) => {
                    let get = |w: Window<'_>, out: &mut [f32]| w.fill(Field::Target, FieldMut::F32(out));
                    store.set(name, &fill(dataset, &starts, ty.len(), each, get)?)?;
                }
                ("mask", _) => {
                    let get = |w: Window<'_>, out: &mut [bool]| w.fill(Field::Imitate, FieldMut::Bool(out));
                    store.set(name, &fill(dataset, &starts, ty.len(), each, get)?)?;
                }
                (_, DType::I32) => {
                    let get =
                        |w: Window<'_>, out: &mut [i32]| w.fill(Field::Observation(leaf), FieldMut::I32(out));
                    store.set(name, &fill(dataset, &starts, ty.len(), each, get)?)?;
                }
                _ => {
                    let get =
                        |w: Window<'_>, out: &mut [f32]| w.fill(Field::Observation(leaf), FieldMut::F32(out));
                    store.set(name, &fill(dataset, &starts, ty.len(), each, get)?)?;
                }
            }
        }
        Ok(Self { store, starts })
    }

    pub fn store(&self) -> &Store {
        &self.store
    }

    /// The rows of a window's steps, [rows, length].
    pub fn fill(&self, out: &mut [i32], window: Window<'_>) {
        for (crop, out) in window.crops.iter().zip(out.chunks_exact_mut(window.length)) {
            let start = self.starts[crop.episode];
            let end = start + window.dataset.episode(crop.episode).steps();
            for (i, row) in out.iter_mut().enumerate() {
                *row = (start + crop.start + window.offset + i).min(end) as i32;
            }
        }
    }
}
