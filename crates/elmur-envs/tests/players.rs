//! What every player promises: to go on from any action, and to know which choices are equally good.

#![allow(clippy::unwrap_used, clippy::panic)]

use elmur_base::Row;
use elmur_envs::popgym::{Difficulty, Family, Task};
use elmur_envs::{Choices, Env, EnvSpec, Environment, Player, Purpose, Registry};
use elmur_rng::Rng;

/// T-Maze, CartPole and the 48 tasks of POPGym.
fn names() -> impl Iterator<Item = &'static str> {
    ["tmaze", "cartpole"].into_iter().chain(Task::all().map(Task::id))
}

fn find(name: &str) -> Environment {
    Registry::builtin().find(&EnvSpec::new(name)).unwrap()
}

/// Whoever plays an episode.
trait Side {
    fn choose(&mut self, seen: &Row, action: &mut Row);
    fn took(&mut self, action: &Row, foreign: bool);
}

/// Plays an episode in which a share of the actions is foreign, drawn from the whole action space. Returns
/// the return.
fn play(env: &mut dyn Env, side: &mut impl Side, share: f64, seed: u64) -> f64 {
    let spaces = env.spaces().clone();
    let (mut seen, mut action) = (Row::of(&spaces.observation), Row::of(&spaces.action));
    let (mut rng, mut total) = (Rng::new(seed, 7), 0.0);
    env.reset(seed, seen.as_mut()).unwrap();
    loop {
        side.choose(&seen, &mut action);
        spaces.action.check("action", action.values()).unwrap();
        let foreign = rng.uniform(0.0, 1.0) < share;
        if foreign {
            action.clear();
            spaces.action.sample(&mut rng, &mut action);
        }
        side.took(&action, foreign);
        let step = env.step(action.values(), seen.as_mut()).unwrap();
        total += step.reward;
        if step.done() {
            return total;
        }
    }
}

/// Two players that must give the same answers: one that has played before, is told of foreign actions only
/// and is asked for its ties; and a new one, told of every action.
struct Both<'a> {
    old: &'a mut dyn Player,
    new: Box<dyn Player>,
    choices: Option<Choices>,
    name: &'a str,
}

impl Side for Both<'_> {
    fn choose(&mut self, seen: &Row, action: &mut Row) {
        let mut copy = action.clone();
        self.old.act(seen.values(), action.as_mut());
        self.new.act(seen.values(), copy.as_mut());
        assert!(*action == copy, "{}: {action:?} and {copy:?}", self.name);
        if let Some(choices) = &self.choices {
            let mut accepted = vec![true; choices.count()];
            choices.accepted(self.old, action.values(), &mut accepted);
            assert!(accepted[choices.index(action.values())], "{}", self.name);
        }
    }

    fn took(&mut self, action: &Row, foreign: bool) {
        self.new.took(action.values());
        if foreign {
            self.old.took(action.values());
        }
    }
}

#[test]
fn players_go_on_from_any_action_and_choose_by_observations_and_actions_alone() {
    for name in names() {
        let environment = find(name);
        let mut env = environment.make(Purpose::Evaluate).unwrap();
        let mut old = environment.player().unwrap();
        for (share, seeds) in [(0.2, 0..3), (0.5, 3..5), (1.0, 5..7)] {
            for seed in seeds {
                let (choices, new) = (Choices::of(&env.spaces().action), environment.player().unwrap());
                let mut both = Both { old: &mut *old, new, choices, name };
                both.old.reset();
                both.new.reset();
                play(&mut *env, &mut both, share, seed);
            }
        }
    }
}

/// A player that does what it chooses, or anything that it holds to be as good.
struct One {
    player: Box<dyn Player>,
    /// Draws among equally good choices.
    ties: Option<(Choices, Rng)>,
    /// How often there was something to draw.
    drawn: usize,
}

impl One {
    fn new(environment: &Environment) -> Self {
        Self { player: environment.player().unwrap(), ties: None, drawn: 0 }
    }
}

impl Side for One {
    fn choose(&mut self, seen: &Row, action: &mut Row) {
        self.player.act(seen.values(), action.as_mut());
        let Some((choices, rng)) = &mut self.ties else { return };
        let mut accepted = vec![false; choices.count()];
        choices.accepted(&mut *self.player, action.values(), &mut accepted);
        let accepted: Vec<usize> = (0..accepted.len()).filter(|i| accepted[*i]).collect();
        self.drawn += usize::from(accepted.len() > 1);
        choices.write(accepted[rng.below(accepted.len() as u32) as usize], &mut action.ints);
    }

    fn took(&mut self, action: &Row, _: bool) {
        self.player.took(action.values());
    }
}

fn returns(environment: &Environment, side: &mut One, share: f64, episodes: u64) -> Vec<f64> {
    let mut env = environment.make(Purpose::Evaluate).unwrap();
    let play = |seed| {
        side.player.reset();
        play(&mut *env, side, share, seed)
    };
    (0..episodes).map(play).collect()
}

/// Mean and standard error.
fn statistics(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
    (mean, (variance / n).sqrt())
}

/// Mean returns with a fifth of the actions foreign, of 300 to 3,000 episodes. Without them players reach
/// [`Task::good_return`] or a little more.
const WITH_FOREIGN: [(Family, [f64; 3]); 16] = [
    // Answers that are wrong three times in four (or less often) cost what right ones pay.
    (Family::Autoencode, [0.70; 3]),
    (Family::CountRecall, [0.61, 0.61, 0.62]),
    (Family::RepeatFirst, [0.70; 3]),
    (Family::RepeatPrevious, [0.70; 3]),
    (Family::Battleship, [0.569, 0.602, 0.618]),
    (Family::Concentration, [0.725, 0.724, 0.580]),
    (Family::HigherLower, [0.422, 0.413, 0.409]),
    (Family::LabyrinthEscape, [0.959, 0.926, 0.871]),
    (Family::LabyrinthExplore, [0.952, 0.890, 0.802]),
    // Nobody recovers from a mine.
    (Family::MineSweeper, [0.420, 0.048, -0.109]),
    (Family::MultiarmedBandit, [0.585, 0.663, 0.692]),
    (Family::NoisyPositionOnlyCartPole, [0.946, 0.568, 0.363]),
    (Family::NoisyPositionOnlyPendulum, [0.813, 0.712, 0.670]),
    (Family::PositionOnlyPendulum, [0.881, 0.842, 0.763]),
    (Family::PositionOnlyCartPole, [0.994, 0.992, 0.988]),
    (Family::VelocityOnlyCartpole, [0.994, 0.992, 0.988]),
];

#[test]
fn players_recover_from_foreign_actions() {
    for (family, expected) in WITH_FOREIGN {
        for (difficulty, expected) in Difficulty::ALL.into_iter().zip(expected) {
            let task = Task { family, difficulty };
            let environment = find(task.id());
            let (mean, error) = statistics(&returns(&environment, &mut One::new(&environment), 0.2, 60));
            assert!(mean > expected - 4.0 * error.max(0.005), "{}: {mean} ± {error}", task.id());
        }
    }
    let cartpole = find("cartpole");
    let (mean, error) = statistics(&returns(&cartpole, &mut One::new(&cartpole), 0.2, 60));
    assert!(mean > 495.8 - 4.0 * error.max(2.0), "{mean} ± {error}");
    // T-Maze leaves one step to spare: nobody makes up for more than one mistake.
    let maze = Registry::builtin().find(&EnvSpec::new("tmaze").with("length", 4)).unwrap();
    let (mean, error) = statistics(&returns(&maze, &mut One::new(&maze), 0.1, 400));
    assert!(mean > 0.9 - 4.0 * error, "{mean} ± {error}");
}

/// The same return on average, whichever of the accepted choices is taken.
#[test]
fn accepted_choices_are_as_good_as_the_players_own() {
    for (name, episodes) in [
        ("popgym-BattleshipEasy", 300),
        ("popgym-ConcentrationEasy", 300),
        ("popgym-ConcentrationHard", 300),
        ("popgym-HigherLowerEasy", 300),
        ("popgym-LabyrinthEscapeEasy", 300),
        ("popgym-LabyrinthExploreMedium", 200),
        ("popgym-MineSweeperEasy", 2000),
        ("popgym-MineSweeperMedium", 600),
        ("popgym-MultiarmedBanditEasy", 300),
    ] {
        let environment = find(name);
        let own = statistics(&returns(&environment, &mut One::new(&environment), 0.0, episodes));
        let mut any = One::new(&environment);
        any.ties = Choices::of(&environment.spaces().action).map(|choices| (choices, Rng::new(1, 1)));
        let other = statistics(&returns(&environment, &mut any, 0.0, episodes));
        let error = (own.1 * own.1 + other.1 * other.1).sqrt();
        assert!((own.0 - other.0).abs() < 4.0 * error, "{name}: {own:?} and {other:?}");
        assert!(any.drawn as u64 > episodes / 4, "{name}: ties in {} steps", any.drawn);
    }
}
