//! A dataset in a device's memory: one row per step, so that a batch is only a list of rows.

use elmur_base::{Field, FieldMut};
use elmur_data::{Crop, Source, Window};
use elmur_engine::{DType, Device, Element, Store};
use elmur_model::Architecture;
use elmur_model::ends::Token;
use elmur_model::window::{Built, WindowProgram};

use crate::error::Result;
use crate::trainer::recorded_bytes;

/// The data's tables, and where each episode begins in them. An episode of T steps has T + 1 rows; the last,
/// for what lies beyond its end, shows its last observation and is not imitated.
#[derive(Debug)]
pub(crate) struct Resident {
    store: Store,
    starts: Vec<usize>,
}

/// Bytes of a table that are on the host at once.
const HOST_BYTES: usize = 64 << 20;

impl Resident {
    /// Number of rows of the tables; none if the data stay on the host: on the CPU, or too large for the GPU.
    pub fn rows(architecture: &dyn Architecture, source: &dyn Source, device: &Device) -> Option<usize> {
        let rows: usize = (0..source.episodes()).map(|i| source.steps(i) + 1).sum();
        let ends = architecture.ends();
        let bytes = recorded_bytes(architecture, source);
        let size =
            |leaf: usize, kind| if kind == elmur_base::Kind::Bytes || bytes.contains(&leaf) { 1 } else { 4 };
        let leaves = ends.observation.iter().enumerate();
        let observed: usize = leaves.map(|(leaf, e)| size(leaf, e.kind()) * e.len()).sum();
        let mut each = observed + 8 * ends.action.dim() + 1;
        each += if ends.tokens.has(Token::Action) { 4 * ends.action.dim() } else { 0 };
        each += if ends.tokens.has(Token::Return) { 4 } else { 0 };
        let bytes = rows.checked_mul(each)?;
        let fits = bytes < device.free_memory()? / 4 && i32::try_from(rows).is_ok();
        fits.then_some(rows)
    }

    /// The tables that a graph declares, filled.
    pub fn new(built: &Built, source: &dyn Source, device: &Device) -> Result<Self> {
        Self::filled(built, source, device, HOST_BYTES)
    }

    /// [`Self::new`] with a bound on the bytes of a table that are on the host at once.
    fn filled(built: &Built, source: &dyn Source, device: &Device, host: usize) -> Result<Self> {
        let store = Store::on(device);
        let mut starts = Vec::with_capacity(source.episodes());
        let mut rows = 0;
        for i in 0..source.episodes() {
            starts.push(rows);
            rows += source.steps(i) + 1;
        }
        let resident = Self { store, starts };
        built.declare(&resident.store, built.tables.iter().map(|(name, _)| name.as_str()))?;
        for (name, field) in &built.tables {
            match resident.store.ty(name)?.dtype {
                DType::I32 => resident.fill_table(name, *field, source, host, |part| FieldMut::I32(part))?,
                DType::I64 => resident.fill_table(name, *field, source, host, |part| FieldMut::I64(part))?,
                DType::U8 => resident.fill_table(name, *field, source, host, |part| FieldMut::U8(part))?,
                DType::Bool => {
                    resident.fill_table(name, *field, source, host, |part| FieldMut::Bool(part))?
                }
                _ => resident.fill_table(name, *field, source, host, |part| FieldMut::F32(part))?,
            }
        }
        Ok(resident)
    }

    /// Fills the table of a field: rows of some episodes at a time, collected on the host and copied to the
    /// device when they are many.
    fn fill_table<T: Element>(
        &self,
        name: &str,
        field: Field,
        source: &dyn Source,
        host: usize,
        part_of: impl Fn(&mut [T]) -> FieldMut<'_>,
    ) -> Result<()> {
        let ty = self.store.ty(name)?;
        let each = ty.len() / ty.shape[0];
        let most = (host / (each * size_of::<T>()).max(1)).max(1);
        let (mut data, mut first, mut held) = (Vec::new(), 0, 0);
        let flush = |first: usize, data: &[T]| {
            let rows: Vec<usize> = (first..first + data.len() / each.max(1)).collect();
            self.store.set_rows(name, &rows, data)
        };
        for episode in 0..self.starts.len() {
            let (steps, crops) = (source.steps(episode) + 1, [Crop::new(episode, 0)]);
            for offset in (0..steps).step_by(most) {
                let length = most.min(steps - offset);
                if held + length > most {
                    flush(first, &data)?;
                    (first, held) = (first + held, 0);
                }
                data.resize((held + length) * each, T::default());
                let window = Window { source, crops: &crops, offset, length };
                window.fill(field, part_of(&mut data[held * each..]))?;
                held += length;
            }
        }
        Ok(flush(first, &data)?)
    }

    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Writes the rows of a window's steps to the input of a program, as window `k` of its run.
    pub fn fill(&self, program: &mut WindowProgram, k: usize, window: Window<'_>) -> Result<()> {
        let count = program.windows();
        let steps = program.program.input_mut::<i32>("steps")?;
        let each = steps.len() / count;
        let out = &mut steps[k * each..(k + 1) * each];
        for (crop, out) in window.crops.iter().zip(out.chunks_exact_mut(window.length)) {
            let start = self.starts[crop.episode];
            let end = start + window.source.steps(crop.episode);
            for (i, row) in out.iter_mut().enumerate() {
                let step = (window.offset + i).saturating_sub(crop.repeated);
                *row = (start + crop.start + step).min(end) as i32;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use elmur_engine::{AdamW, Pool};
    use elmur_model::window::{Begin, TrainSettings, training_graph};
    use elmur_model::{Architecture, presets};

    use super::*;
    use crate::RunConfig;

    #[test]
    fn tables_do_not_depend_on_how_much_is_on_the_host_at_once() {
        let mut config = RunConfig::preset("tmaze-quick").unwrap();
        config.data.episodes = 30;
        let (source, device) = (
            config.prepare(&elmur_envs::Registry::builtin(), true).unwrap().data,
            Device::from(&Pool::new(1)),
        );
        let model = presets::model("tmaze").unwrap();
        let rows = (0..30).map(|i| source.steps(i) + 1).sum();
        let settings = TrainSettings {
            batch: 2,
            label_smoothing: 0.0,
            ties: false,
            optimizer: AdamW::default(),
            clip: 1.0,
            dtype: DType::F32,
            export_gradients: false,
            dropout: true,
            table: Some(rows),
            augment: Default::default(),
            bytes: Vec::new(),
            weights: None,
        };
        let built =
            training_graph(model.architecture() as &dyn Architecture, &settings, Begin::Fresh).unwrap();
        assert!(!built.tables.is_empty());
        let whole = Resident::new(&built, &*source, &device).unwrap();
        let mut checked = 0;
        for host in [1, 100, 1000, 5000] {
            let parts = Resident::filled(&built, &*source, &device, host).unwrap();
            for (name, field) in &built.tables {
                match whole.store.ty(name).unwrap().dtype {
                    DType::F32 => {
                        let table = parts.store.get::<f32>(name).unwrap();
                        assert_eq!(table, whole.store.get::<f32>(name).unwrap(), "{field}");
                        let width = table.len() / rows;
                        for (episode, start) in parts.starts.iter().enumerate() {
                            let length = source.steps(episode) + 1;
                            let mut expected = vec![0.0; length * width];
                            let crops = [Crop::new(episode, 0)];
                            let window = Window { source: &*source, crops: &crops, offset: 0, length };
                            window.fill(*field, FieldMut::F32(&mut expected)).unwrap();
                            assert_eq!(table[start * width..(start + length) * width], expected);
                            checked += 1;
                        }
                    }
                    DType::I64 => {
                        assert_eq!(
                            parts.store.get::<i64>(name).unwrap(),
                            whole.store.get::<i64>(name).unwrap()
                        );
                    }
                    _ => {}
                }
            }
        }
        assert!(checked >= 4 * 30);
    }
}
