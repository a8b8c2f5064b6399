use elmur_envs::EnvSpec;
use elmur_model::Checkpoint;
use elmur_model::baselines::TransformerXl;

use super::*;
use crate::overrides;
use crate::schedule::{Decay, Unit};

fn with(preset: &str, policy: &str) -> RunConfig {
    RunConfig::preset(preset).unwrap().with_policy(policy, &Registry::builtin()).unwrap()
}

fn changed(preset: &str, changes: &[&str]) -> Result<RunConfig> {
    overrides::apply(&RunConfig::preset(preset).unwrap(), changes, &Registry::builtin())
}

fn transformer(run: &RunConfig) -> &TransformerXl {
    match &run.model {
        PolicyConfig::TransformerXl(model) => model,
        other => panic!("{other:?}"),
    }
}

#[test]
fn policies_are_found_by_every_name_and_misspelt_ones_are_answered_with_the_nearest() {
    for name in PolicyName::all() {
        assert_eq!(PolicyName::find(&name.name()).unwrap(), name);
        for alias in name.aliases() {
            assert_eq!(PolicyName::find(&alias).unwrap(), name, "{alias}");
        }
        assert!(name.summary().split(' ').count() >= 3, "{name:?}");
    }
    assert_eq!(PolicyName::find("bc_lstm").unwrap(), PolicyName { policy: Policy::BcLstm, compat: false });
    assert_eq!(PolicyName::find("cql-mlp-compat").unwrap(), PolicyName { policy: Policy::Cql, compat: true });
    let message = |name: &str| PolicyName::find(name).unwrap_err().to_string();
    assert!(message("lstn").contains("did you mean `lstm`"), "{}", message("lstn"));
    assert!(message("bc-lsmt-compat").contains("did you mean `bc-lstm-compat`"));
    assert!(message("mlp-compat").contains("no published quirks"), "{}", message("mlp-compat"));
    assert!(message("3").starts_with("config `policy`: expected one of elmur, "), "{}", message("3"));
}

/// Whether a policy is not for what a preset sees or does.
fn unusable(base: &RunConfig, name: PolicyName) -> bool {
    let ends = base.model.architecture().ends();
    let images = ends.observation.iter().any(Encoder::is_image);
    match name.policy {
        Policy::Cql => !ends.action.is_discrete() && name.compat,
        Policy::CqlLstm => !ends.action.is_discrete(),
        Policy::Diffusion | Policy::CqlContinuous => ends.action.is_discrete() && base.env.is_some(),
        Policy::Tt => images,
        _ => false,
    }
}

#[test]
fn every_policy_makes_a_whole_run_of_every_preset() {
    let tasks = ["popgym-RepeatFirstEasy", "popgym-BattleshipHard", "popgym-PositionOnlyPendulumMedium"];
    let compat = ["popgym-RepeatFirstEasy-compat", "popgym-autoencode-easy"];
    let presets = [
        "tmaze",
        "tmaze-quick",
        "cartpole",
        "remember-color",
        "take-it-back",
        "small",
        "tmaze-dt",
        "mikasa-ShellGameTouch",
    ];
    for preset in presets.into_iter().chain(tasks).chain(compat) {
        let base = RunConfig::preset(preset).unwrap();
        for name in PolicyName::all() {
            let change = format!("policy={}", name.name());
            let run = overrides::apply(&base, &[&change], &Registry::builtin());
            if unusable(&base, name) {
                let error = run.unwrap_err().to_string();
                assert!(
                    error.contains("config `model.") && error.contains("expected"),
                    "{preset} {change}: {error}"
                );
                continue;
            }
            let run = run.unwrap_or_else(|e| panic!("{preset} {change}: {e}"));
            run.validate().unwrap_or_else(|e| panic!("{preset} {change}: {e}"));
            // The shortest are chunks of a diffusion policy.
            assert!(run.crop() >= 8, "{preset} {change}: {}", run.crop());
            // Written and read again, as a run's folder does.
            let json = serde_json::to_string(&run).unwrap();
            assert_eq!(serde_json::from_str::<RunConfig>(&json).unwrap(), run);
        }
    }
}

#[test]
fn published_sizes_have_the_published_numbers_of_parameters() {
    // Those of the published T-Maze commands that can influence the output.
    for (policy, parameters) in [
        ("rate-compat", 429_760),
        ("rmt-compat", 726_144),
        ("trxl-compat", 725_504),
        ("dt-compat", 725_504),
        ("dmamba-compat", 133_120),
        ("bc-mlp", 25_664),
        ("bc-lstm-compat", 100_160),
        ("cql-compat", 167_232),
        ("cql-lstm-compat", 463_680),
    ] {
        let count = Checkpoint::parameter_count(&with("tmaze", policy).model).unwrap();
        assert_eq!(count, parameters, "{policy}");
    }
}

#[test]
fn the_benchmark_decides_sizes_and_settings() {
    let maze = with("tmaze", "dt");
    let t = &maze.train;
    assert_eq!((t.batch, t.lr, t.weight_decay, t.clip), (64, 1e-4, 0.001, 1.0));
    assert_eq!((t.epochs, t.schedule.warmup, t.schedule.end_factor), (Some(200), WARM_UP, 0.01));
    assert_eq!((transformer(&maze).layers, transformer(&maze).window, maze.crop()), (8, 30, 30));
    let task = with("popgym-PositionOnlyPendulumEasy", "dt");
    let model = transformer(&task);
    assert_eq!(
        (model.d_model, model.d_head, model.d_ff, model.heads, model.layers),
        (128, 256, Some(64), 4, 2)
    );
    assert_eq!((task.train.lr, task.train.weight_decay, model.action_tanh), (3e-4, 0.01, true));
    assert_eq!((task.train.batches, task.train.schedule.decay), (Some(3000), Decay::Cosine));
    let robot = with("take-it-back", "dt");
    assert_eq!((transformer(&robot).layers, transformer(&robot).window, robot.train.lr), (4, 180, 1e-4));
    assert_eq!(
        (transformer(&with("remember-color", "dt")).layers, transformer(&with("cartpole", "dt")).layers),
        (10, 4)
    );
    // Another environment is another benchmark, whatever the preset.
    let pole = changed("tmaze", &["policy=dt", "env=cartpole"]).unwrap();
    assert_eq!((transformer(&pole).layers, transformer(&pole).action.outputs()), (4, 2));
    assert_eq!(transformer(&changed("small", &["policy=dt"]).unwrap()).layers, 3);
}

#[test]
fn segments_cover_the_crop_and_memory_is_trained_through_all_of_them() {
    let parts = |run: &RunConfig| {
        let model = transformer(run);
        let memory = [model.memory_tokens, model.cache_tokens, model.valve_heads];
        (model.window, run.train.segments, model.unroll, memory)
    };
    assert_eq!(parts(&with("tmaze", "rate")), (10, 3, 3, [15, 0, 2]));
    assert_eq!(parts(&with("tmaze", "rmt")), (10, 3, 3, [10, 0, 0]));
    assert_eq!(parts(&with("tmaze", "trxl")), (10, 3, 1, [0, 90, 0]));
    assert_eq!(parts(&with("tmaze", "trxl-compat")), (10, 3, 1, [0, 450, 0]));
    assert_eq!(parts(&with("tmaze", "rate-compat")), (10, 3, 1, [15, 0, 2]));
    assert_eq!(parts(&with("cartpole", "trxl")), (30, 3, 1, [0, 90, 0]));
    assert_eq!(parts(&with("take-it-back", "rate")), (60, 3, 3, [15, 40, 0]));
    let hard = with("popgym-RepeatFirstHard", "rate");
    assert_eq!(parts(&hard), (70, 12, 12, [30, 40, 2]));
    assert!(hard.crop() >= 831 && transformer(&hard).d_ff.is_none());
    assert_eq!(parts(&with("popgym-RepeatFirstHard", "rate-compat")), (93, 3, 1, [30, 40, 2]));
    assert_eq!(parts(&changed("small", &["policy=rate"]).unwrap()), (20, 3, 3, [8, 0, 2]));
    let compat = transformer(&with("tmaze", "rate-compat")).compat;
    assert!(compat.equal_memory_tokens && compat.valve_dropout_in_eval && compat.commit_without_last_action);
    assert_eq!(transformer(&with("tmaze", "rate")).compat, Default::default());
}

#[test]
fn published_forms_have_the_published_schedules_and_contexts() {
    let task = with("popgym-HigherLowerEasy-compat", "dt-compat");
    // Trained on the first third of an episode; a cosine over 1e7 tokens; 400 epochs.
    assert_eq!((transformer(&task).window, task.crop()), (18, 18));
    let schedule = task.train.schedule;
    assert_eq!((schedule.unit, schedule.total), (Unit::Tokens, Some(10_000_000)));
    assert_eq!((task.train.epochs, task.train.batches, task.train.standardize), (Some(400), None, false));
    assert!(
        transformer(&task).compat.double_residual
            && !transformer(&with("tmaze", "dt")).compat.double_residual
    );
    // A linear decay that is planned for three optimizer steps a batch.
    let maze = with("tmaze", "bc-lstm-compat");
    assert_eq!(maze.train.schedule.total, Some(100 + 3 * 100 * 75));
    let PolicyConfig::BcLstm(model) = &maze.model else { panic!("{:?}", maze.model) };
    assert!(model.compat.random_hidden);
    assert_eq!(with("tmaze", "dt-compat").train.schedule.warmup, 1000);
    assert_eq!((with("remember-color", "dt-compat").train.schedule.warmup, WARM_UP), (10_000, 100));
    assert_eq!(with("remember-color", "dt").train.schedule.warmup, WARM_UP);
}

/// Optimizer steps of warm-up where the published number is long for a run, or longer than it.
const WARM_UP: u64 = 100;

/// Published policies draw their actions in POPGym, but for numbers and cells of boards, and ask for a return of 1.
#[test]
fn published_forms_act_as_published() {
    for (preset, policy, sample, target) in [
        ("popgym-RepeatFirstEasy", "rate-compat", true, Some(1.0)),
        ("popgym-RepeatFirstEasy", "rate", false, None),
        ("popgym-RepeatFirstEasy", "bc-lstm-compat", true, None),
        ("popgym-RepeatFirstEasy-compat", "dt-compat", true, Some(1.0)),
        ("popgym-BattleshipEasy", "dt-compat", false, Some(1.0)),
        ("popgym-PositionOnlyPendulumEasy", "dt-compat", false, Some(1.0)),
        ("tmaze", "dt-compat", false, None),
    ] {
        let eval = with(preset, policy).eval;
        assert_eq!((eval.sample, eval.target_return), (sample, target), "{preset} with {policy}");
    }
    let own = changed("popgym-RepeatFirstEasy", &["policy=dt-compat", "eval.target_return=0.5"]).unwrap();
    assert_eq!(own.eval.target_return, Some(0.5));
}

#[test]
fn what_is_no_matter_of_the_policy_stays() {
    let changes = ["train.seed=7", "train.threads=3", "train.checkpoint_every=11", "eval.every=13"];
    let base = changed("tmaze-quick", &changes).unwrap();
    let run = base.with_policy("lstm", &Registry::builtin()).unwrap();
    assert_eq!((run.train.seed, run.train.threads, run.train.checkpoint_every), (7, Some(3), 11));
    assert_eq!((run.eval.every, &run.data, &run.env), (Some(13), &base.data, &base.env));
    // Not longer than the run that it is for.
    assert_eq!((run.train.epochs, run.train.batches), (Some(54), None));
    // Single settings come after the policy, wherever they stand.
    let run = changed("tmaze", &["train.lr=0.5", "policy=lstm", "model.hidden=7"]).unwrap();
    let PolicyConfig::BcLstm(model) = &run.model else { panic!("{:?}", run.model) };
    assert_eq!((run.train.lr, model.hidden), (0.5, 7));
    // ELMUR stays what it is, and follows other policies as its own preset has it.
    assert_eq!(with("tmaze-quick", "elmur"), RunConfig::preset("tmaze-quick").unwrap());
    assert_eq!(with("tmaze-dt", "elmur").model, RunConfig::preset("tmaze").unwrap().model);
    let task = "popgym-RepeatFirstEasy";
    assert_eq!(with(&format!("{task}-dt"), "elmur").model, RunConfig::preset(task).unwrap().model);
}

#[test]
fn policies_that_cannot_look_back_are_validated_on_the_length_they_train_on() {
    let length = |policy: &str| with("tmaze", policy).eval.settings.get("length").cloned();
    assert_eq!((length("lstm"), length("dt"), length("mlp")), (Some(9600.into()), None, None));
    assert_eq!((length("rate"), length("rmt"), length("trxl")), (Some(9600.into()), Some(9600.into()), None));
    assert_eq!((length("dmamba"), length("dmamba-compat")), (Some(9600.into()), None));
    assert_eq!(changed("tmaze", &["policy=dt", "eval.length=90"]).unwrap().eval.settings["length"], 90);
}

#[test]
fn previous_actions_are_shown_to_policies_without_action_tokens() {
    let shows = |run: &RunConfig| run.env.as_ref().unwrap().wrappers.previous_action;
    let task = "popgym-PositionOnlyCartPoleEasy";
    assert!(shows(&with(task, "lstm")) && shows(&with(task, "elmur")) && !shows(&with(task, "dt")));
    assert!(shows(&with(&format!("{task}-dt"), "mlp")));
    // Where nothing is ambiguous, where a user decided, and where the published code shows nothing.
    assert!(!shows(&with("popgym-RepeatFirstEasy", "lstm")));
    assert!(shows(&changed(task, &["env.wrappers.previous_action=true", "policy=dt"]).unwrap()));
    assert!(!shows(&with(&format!("{task}-compat"), "lstm")));
    let own = EnvSpec::new(format!("{task}-v0"));
    let run = RunConfig { env: Some(own), ..RunConfig::preset("small").unwrap() };
    assert!(!shows(&run.with_policy("dt", &Registry::builtin()).unwrap()));
}

#[test]
fn the_start_of_an_episode_is_flagged_where_previous_actions_are_shown() {
    let wrappers = |run: &RunConfig| run.env.as_ref().unwrap().wrappers;
    let flagged = |run: &RunConfig| wrappers(run).first_step;
    for task in Task::all() {
        let run = RunConfig::preset(task.name()).unwrap();
        assert_eq!(flagged(&run), wrappers(&run).previous_action, "{}", task.name());
        assert!(!flagged(&RunConfig::preset(&format!("{}-compat", task.name())).unwrap()), "{}", task.name());
    }
    let task = "popgym-MineSweeperEasy";
    assert!(flagged(&with(task, "lstm")) && flagged(&with(&format!("{task}-dt"), "mlp")));
    assert!(!flagged(&with(task, "dt")) && !flagged(&with(task, "lstm-compat")));
    assert!(flagged(&with_policy_of(&with(task, "lstm-compat"), "elmur")));
    // A run that was saved before the flag was the default, and one that a user has decided on.
    let mut earlier = RunConfig::preset(task).unwrap();
    earlier.env.as_mut().unwrap().wrappers.first_step = false;
    assert!(flagged(&with_policy_of(&earlier, "lstm")));
    let without = changed(task, &["env.wrappers.first_step=false"]).unwrap();
    let leaves = |run: &RunConfig| run.model.architecture().ends().observation.len();
    assert_eq!((leaves(&RunConfig::preset(task).unwrap()), leaves(&without)), (3, 2));
}

fn with_policy_of(run: &RunConfig, policy: &str) -> RunConfig {
    run.with_policy(policy, &Registry::builtin()).unwrap()
}

#[test]
fn presets_with_a_policy_in_their_name_are_the_same_run() {
    for (preset, base, policy) in [
        ("tmaze-bc-lstm", "tmaze", "lstm"),
        ("tmaze-dt", "tmaze", "dt"),
        ("popgym-MineSweeperEasy-bc-lstm", "popgym-MineSweeperEasy", "bc-lstm"),
        ("popgym-MineSweeperEasy-dt", "popgym-MineSweeperEasy", "dt"),
    ] {
        let named = RunConfig::preset(preset).unwrap();
        assert_eq!(changed(base, &[&format!("policy={policy}")]).unwrap(), changed(preset, &[]).unwrap());
        if let Some(model) = elmur_model::presets::model(preset) {
            assert_eq!(named.model, model);
        }
    }
}

#[test]
fn the_policy_is_no_key_of_a_config_but_one_of_the_command_line() {
    let run = changed("tmaze", &["policy=lstm", "policy=mlp"]).unwrap();
    assert_eq!(run.model.kind(), "bc_mlp", "the last one counts");
    assert!(!overrides::keys(&run).iter().any(|key| key.starts_with("policy")));
    assert_eq!(overrides::named_policy(&["train.lr=1", "policy=dt", "policy=mlp"]), Some("mlp"));
    assert_eq!(overrides::named_policy(&["policy.x=1", "policy"]), None);
    let message = |change: &str| changed("tmaze", &[change]).unwrap_err().to_string();
    assert!(message("polcy=dt").contains("did you mean `policy`"), "{}", message("polcy=dt"));
    assert!(
        message("policy=rat3").contains("config `policy`: expected one of"),
        "{}",
        message("policy=rat3")
    );
    assert!(message("policy").contains("KEY=VALUE"));
}

/// A file with one episode of one step in these spaces, which have an observation of three numbers.
fn recording(name: &str, spaces: elmur_base::Spaces) -> std::path::PathBuf {
    use elmur_data::{Column, Dataset, Episode};
    let actions = Column::F32(vec![0.0; spaces.action.widths().floats]);
    let episode = Episode {
        observations: vec![Column::F32(vec![0.0; 3])],
        actions: vec![actions],
        rewards: vec![0.0],
        terminated: false,
        truncated: true,
        imitate: None,
        labels: None,
        accepted: None,
    };
    let path = std::env::temp_dir().join(format!("elmur-policies-{name}-{}.elmur", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let data = Dataset::from_episodes(spaces, Default::default(), vec![episode]).unwrap();
    data.save(&path).unwrap();
    path
}

#[test]
fn policies_for_other_actions_say_what_they_expect() {
    let message =
        |preset: &str, policy: &str| changed(preset, &[&format!("policy={policy}")]).unwrap_err().to_string();
    let diffusion = message("tmaze", "dp");
    assert!(diffusion.starts_with("config `model.action`: expected continuous actions"), "{diffusion}");
    let recurrent = message("popgym-PositionOnlyPendulumEasy", "cql-lstm");
    assert!(recurrent.contains("config `model.action`: expected one choice"), "{recurrent}");
    // Conservative Q-learning has a form for each kind of actions.
    let kind = |preset: &str| with(preset, "cql").model.kind();
    assert_eq!((kind("tmaze"), kind("popgym-PositionOnlyPendulumEasy")), ("cql", "cql_continuous"));
    assert_eq!(kind("remember-color"), "cql_continuous");
    // Without an environment the data decide.
    let mut run = changed("small", &["policy=diffusion"]).unwrap();
    let spaces = |n: usize| elmur_base::Spaces {
        observation: elmur_base::Space::unbounded([3]),
        action: elmur_base::Space::unbounded([n]),
    };
    run.model.fit_to(&spaces(2)).unwrap();
    run.validate().unwrap();
    // A file is looked into, wherever it stands among the changes; one that is not there is missed later.
    let data = recording("actions", spaces(2));
    let file = format!("data.file={}", data.display());
    let cql = changed("small", &["policy=cql", &file]).unwrap();
    std::fs::remove_file(&data).unwrap();
    assert_eq!(cql.model.kind(), "cql_continuous");
    assert_eq!((cql.train.weight_decay, cql.train.clip), (0.0, 1e9));
    assert_eq!(changed("small", &["policy=cql", &file]).unwrap().model.kind(), "cql");
    let PolicyConfig::Diffusion(model) = &with("remember-color", "diffusion-compat").model.clone() else {
        panic!("another policy")
    };
    assert!(model.compat.replan_every_step && model.compat.raw_weights);
    assert_eq!((model.step_embed, model.sampler), (128, DiffusionSampler::Ddpm));
}

#[test]
fn settings_that_files_leave_out_can_be_changed() {
    let random = |run: &RunConfig| match &run.model {
        PolicyConfig::BcLstm(model) => model.compat.random_hidden,
        other => panic!("{other:?}"),
    };
    let run = changed("tmaze", &["policy=lstm"]).unwrap();
    assert!(overrides::keys(&run).iter().any(|key| key == "model.compat.random_hidden") && !random(&run));
    assert!(random(&changed("tmaze", &["model.compat.random_hidden=true", "policy=lstm"]).unwrap()));
    let error = changed("tmaze", &["policy=mlp", "model.compat.random_hidden=true"]).unwrap_err().to_string();
    assert!(error.contains("no such key"), "{error}");
    let error = changed("tmaze", &["policy=lstm", "model.compat.random_hiden=true"]).unwrap_err().to_string();
    assert!(error.contains("did you mean `model.compat.random_hidden`"), "{error}");
}
