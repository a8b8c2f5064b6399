//! robomimic: one HDF5 file with a group per demonstration.
//!
//! `data/demo_<n>` holds `actions`, `rewards`, `dones` and `states` of T rows, `obs/<key>` of T rows and
//! perhaps `next_obs/<key>`, whose last row is the observation after the last action. `mask/<name>` lists the
//! demonstrations of a split. Demonstrations are read in the order of their numbers, also those of a mask.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;

use elmur_base::Spaces;

use crate::array::{Array, floats};
use crate::episode::Episode;
use crate::error::Result;
use crate::fields::{Field, action_space, observation_space};
use crate::hdf5::Hdf5;
use crate::keys::{ObservationKey, Selection, unknown_key};
use crate::limits::Limits;
use crate::recordings::Recordings;

/// A file and which of its demonstrations and keys are read.
#[derive(Debug)]
pub(crate) struct Robomimic {
    file: Hdf5,
    spaces: Spaces,
    metadata: BTreeMap<String, String>,
    observations: Vec<Field>,
    action: Field,
    demos: Vec<String>,
    /// Whether every key has an observation after the last action.
    final_observation: bool,
    limits: Limits,
}

impl Robomimic {
    /// Whether a file has a group of demonstrations.
    pub(crate) fn is_in(file: &Hdf5) -> Result<bool> {
        let (groups, _) = file.members("")?;
        Ok(groups.iter().any(|name| name == "data")
            && file.members("data")?.0.iter().any(|name| number(name).is_some()))
    }

    pub(crate) fn open(
        file: Hdf5,
        known: Option<&Spaces>,
        selection: &Selection,
        limits: &Limits,
    ) -> Result<Self> {
        let plain = Selection { mask: None, ..selection.clone() };
        plain.only_keys("a robomimic file").map_err(|problem| file.error(problem))?;
        let demos = demos(&file, selection.mask.as_deref())?;
        let first = format!("data/{}", demos[0]);
        let mut keys = match file.members(&first)?.0.iter().any(|name| name == "obs") {
            true => file.datasets_below(&format!("{first}/obs"))?,
            false => Vec::new(),
        };
        let shown = keys.len();
        let has_states = file.find(&format!("{first}/states"))?.is_some();
        if has_states && (selection.keys.iter().any(|key| key == "states") || shown == 0) {
            keys.push("states".to_owned());
        }
        if shown == 0 && selection.keys.is_empty() {
            let problem = format!(
                "`{first}` has no observations; extract them with robomimic's dataset_states_to_obs.py, or choose \
                 the key `states`"
            );
            return Err(file.error(problem));
        }
        let names: Vec<&str> = keys.iter().map(String::as_str).collect();
        let chosen = selection.choose(&names).map_err(|problem| file.error(problem))?;
        let field = |name: &str, place: &str| -> Result<_> {
            let data = file.data(place)?;
            let element = data.element().ok_or_else(|| file.error(format!("`{name}`: expected numbers")))?;
            Ok((data.shape()?.get(1..).unwrap_or_default().to_vec(), element))
        };
        let mut observations = Vec::new();
        for key in chosen {
            let (shape, element) = field(names[key], &observed(&first, names[key]))?;
            observations.push(Field::observed(names[key], &shape, element));
        }
        let (shape, element) = field("actions", &format!("{first}/actions"))?;
        let action = Field::acted("actions", &shape, element).map_err(|problem| file.error(problem))?;
        let spaces = match known {
            Some(known) => known.clone(),
            None => Spaces {
                observation: observation_space(&observations),
                action: action_space(std::slice::from_ref(&action)),
            },
        };
        let mut final_observation = true;
        for field in &observations {
            final_observation &= file.find(&followed(&first, &field.name))?.is_some();
        }
        let mut metadata = BTreeMap::from([
            ("format".to_owned(), "robomimic".to_owned()),
            ("source".to_owned(), file.path().display().to_string()),
        ]);
        metadata.extend(selection.mask.clone().map(|mask| ("mask".to_owned(), mask)));
        metadata.extend(file.text_attribute("data", "env_args").map(|args| ("env_args".to_owned(), args)));
        let noted: Vec<ObservationKey> = observations.iter().map(Field::key).collect();
        ObservationKey::note(&noted, &mut metadata);
        Ok(Self { file, spaces, metadata, observations, action, demos, final_observation, limits: *limits })
    }
}

/// Where an observation of a demonstration lies.
fn observed(demo: &str, key: &str) -> String {
    if key == "states" { format!("{demo}/states") } else { format!("{demo}/obs/{key}") }
}

/// Where the observations one step later lie.
fn followed(demo: &str, key: &str) -> String {
    format!("{demo}/next_obs/{key}")
}

/// The number of a demonstration's name.
fn number(name: &str) -> Option<u64> {
    name.strip_prefix("demo_")?.parse().ok()
}

/// The demonstrations of a mask or of the file, by their numbers.
fn demos(file: &Hdf5, mask: Option<&str>) -> Result<Vec<String>> {
    let (groups, _) = file.members("data")?;
    let mut demos: Vec<String> = groups.into_iter().filter(|name| number(name).is_some()).collect();
    if let Some(mask) = mask {
        let (_, masks) = match file.members("")?.0.iter().any(|name| name == "mask") {
            true => file.members("mask")?,
            false => Default::default(),
        };
        let names: Vec<&str> = masks.iter().map(String::as_str).collect();
        if !names.contains(&mask) {
            return Err(file.error(format!("mask: {}", unknown_key(mask, &names))));
        }
        let mut chosen = file.data(&format!("mask/{mask}"))?.texts()?;
        chosen.iter_mut().for_each(|name| *name = name.trim_end_matches('\0').to_owned());
        if let Some(missing) = chosen.iter().find(|name| !demos.contains(name)) {
            return Err(file.error(format!("mask {mask:?} names {missing:?}, which the file does not have")));
        }
        demos = chosen;
    }
    demos.sort_by_key(|name| number(name));
    demos.dedup();
    match demos.is_empty() {
        true => Err(file.error("no demonstrations; expected groups data/demo_0, data/demo_1, ...")),
        false => Ok(demos),
    }
}

impl Recordings for Robomimic {
    fn spaces(&self) -> &Spaces {
        &self.spaces
    }

    fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    fn episodes(&self) -> usize {
        self.demos.len()
    }

    fn file(&self, _: usize) -> &Path {
        self.file.path()
    }

    fn load(&self, episode: usize, _: bool) -> Result<Episode> {
        let (file, limit) = (&self.file, self.limits.inflated);
        let name = &self.demos[episode];
        let demo = format!("data/{name}");
        let fail = |problem: String| file.error(format!("{name}: {problem}"));
        let left = Cell::new(limit);
        let actions = file.data(&format!("{demo}/actions"))?.read_all(&left)?;
        let steps = actions.rows();
        if let Some(samples) = file.number_attribute(&demo, "num_samples")
            && samples != steps as f64
        {
            return Err(fail(format!(
                "{steps} actions where num_samples says {samples}; is the file whole?"
            )));
        }
        let mut observations = Vec::new();
        for field in &self.observations {
            let mut array = file.data(&observed(&demo, &field.name))?.read_all(&left)?;
            if array.rows() != steps {
                return Err(fail(format!("`{}`: {} rows for {steps} actions", field.name, array.rows())));
            }
            if self.final_observation {
                let next = file.data(&followed(&demo, &field.name))?;
                let last: Array = next.read(steps.saturating_sub(1)..steps, &left)?;
                array = array.followed_by(last).map_err(fail)?;
            }
            observations.push((field.name.clone(), field.prepared(array).map_err(fail)?));
        }
        let per_step = |key: &str| -> Result<Option<Vec<f32>>> {
            let Some(data) = file.find(&format!("{demo}/{key}"))? else { return Ok(None) };
            let numbers = floats(data.read_all(&left)?.numbers);
            match numbers.len() == steps {
                true => Ok(Some(numbers)),
                false => Err(fail(format!("`{key}`: {} numbers for {steps} actions", numbers.len()))),
            }
        };
        let terminated = per_step("dones")?.is_some_and(|dones| dones.iter().any(|done| *done != 0.0));
        Ok(Episode {
            observations: Array::columns_of(observations, &self.spaces.observation, limit).map_err(fail)?,
            actions: self
                .action
                .prepared(actions)
                .and_then(|actions| actions.columns("actions", &self.spaces.action, limit))
                .map_err(fail)?,
            rewards: per_step("rewards")?.unwrap_or_else(|| vec![0.0; steps]),
            terminated,
            truncated: !terminated,
            imitate: None,
            labels: None,
            accepted: None,
        })
    }
}
