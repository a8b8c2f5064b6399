//! Players of both labyrinths. They draw a map of rooms while they walk and decide in rooms; in a passage
//! they go on to the room that they had decided on, unless another has led them there.
//!
//! The map's rows count from the start's side, its columns from the start: where along its side the start
//! lies is not shown, so the maze may reach further to either side until as many columns as it has are
//! known. A *door* is a room not visited yet next to one that is, with an open passage between; once the
//! goal has been seen, the room before it is the only one.
//!
//! Observations show the last action, whoever took it. Together with what was free before, it tells where the
//! agent is.

use elmur_base::{Values, ValuesMut};

use super::{FREE, GOAL, START, WALL, rooms};
use crate::env::Player;
use crate::popgym::Difficulty;

/// The map has a border of one room; the start's column is in the middle.
const WIDTH: usize = 19;
const ROOMS: usize = 11 * WIDTH;
const FIRST: usize = WIDTH + WIDTH / 2;

/// Directions on the map: towards the start's side, away from it, and to both hands.
const STEPS: [isize; 4] = [-(WIDTH as isize), WIDTH as isize, -1, 1];
const BACK: usize = 0;
const FORWARD: usize = 1;
/// The direction that leads back.
const OPPOSITE: [usize; 4] = [1, 0, 3, 2];
/// Where a window shows the cell that an action leads to.
const LOOK: [usize; 4] = [3, 5, 1, 7];
/// Where a window shows the cell that the agent is on; on row 0 and column 0, the cell before it.
const MIDDLE: usize = 4;
/// A distance that stands for no way.
const FAR: u8 = u8::MAX;
/// The direction of the first step where no step has been made.
const NOWHERE: u8 = 4;

#[derive(Debug, Clone, Copy)]
struct Door {
    room: u8,
    /// Passages to go through; half a passage does not count.
    distance: u8,
    /// Direction of the first step.
    way: u8,
}

/// Where the agent stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spot {
    /// On the border, before the first room.
    Start,
    Room(usize),
    /// In the passage from this room in this direction.
    Passage(usize, usize),
}

/// What a walker knows.
#[derive(Debug, Clone)]
struct Map {
    /// Rooms along a side of the maze.
    size: usize,
    /// Actions of the four directions.
    actions: [usize; 4],
    /// Whether the first observation has come.
    begun: bool,
    at: Spot,
    /// One bit per direction in which nothing stands in the agent's way.
    free: u8,
    /// The passage that the player has decided to go through.
    decided: Option<Spot>,
    /// The room before the goal, and the direction of the goal.
    goal: Option<(usize, usize)>,
    visited: [bool; ROOMS],
    /// One bit per direction with a passage, of visited rooms.
    open: [u8; ROOMS],
    /// The outermost columns known to be in the maze.
    columns: (usize, usize),
    /// Nearest first.
    doors: Vec<Door>,
    /// Directions as good as the one chosen last, one bit each.
    ties: u8,
}

/// All four directions.
const ALL: u8 = 0b1111;

impl Map {
    fn new(difficulty: Difficulty) -> Self {
        Self {
            size: rooms(difficulty),
            actions: [0; 4],
            begun: false,
            at: Spot::Start,
            free: 0,
            decided: None,
            goal: None,
            visited: [false; ROOMS],
            open: [0; ROOMS],
            columns: (FIRST % WIDTH, FIRST % WIDTH),
            doors: Vec::with_capacity(ROOMS),
            ties: 0,
        }
    }

    fn reset(&mut self) {
        let first = FIRST % WIDTH;
        (self.begun, self.at, self.free) = (false, Spot::Start, 0);
        (self.decided, self.goal, self.columns) = (None, None, (first, first));
        (self.visited, self.open) = ([false; ROOMS], [0; ROOMS]);
    }

    /// Whether the maze may have this room.
    fn holds(&self, room: usize) -> bool {
        let (least, most) = self.columns;
        let column = room % WIDTH;
        (1..=self.size).contains(&(room / WIDTH)) && column + self.size > most && column < least + self.size
    }

    /// Takes an observation in. The direction to go, unless there is something to decide: then `self.doors`
    /// holds at least one door.
    fn look(&mut self, observation: &[i32]) -> Option<usize> {
        if self.begun {
            self.follow(observation.get(9).copied());
        } else {
            self.begun = true;
            self.turn(observation);
        }
        self.look_around(observation);
        if self.decided != Some(self.at) {
            self.decided = None;
        }
        match (self.at, self.decided, self.goal) {
            (Spot::Start, ..) => return self.only(FORWARD),
            (_, Some(Spot::Passage(_, way)), _) => return self.only(way),
            (Spot::Room(room), _, Some((before, way))) if room == before => return self.only(way),
            _ => self.find_doors(),
        }
        if self.doors.is_empty() {
            self.ties = ALL;
            return Some(FORWARD);
        }
        None
    }

    /// Takes from the first observation which way the start faces. On row 0 and column 0 the window begins
    /// with the start, elsewhere the start is in its middle.
    fn turn(&mut self, observation: &[i32]) {
        let sees = |i: usize, cell: u8| observation.get(i).is_some_and(|seen| *seen == i32::from(cell));
        let [left, right, up, down] = [0, 1, 2, 3];
        self.actions = if sees(1, START) {
            [up, down, left, right]
        } else if sees(3, START) {
            [left, right, up, down]
        } else if sees(1, FREE) {
            [down, up, left, right]
        } else {
            [right, left, up, down]
        };
    }

    /// Moves on the map as the last action has moved the agent.
    fn follow(&mut self, action: Option<i32>) {
        let way = self.actions.iter().position(|known| Some(*known as i32) == action);
        let Some(way) = way.filter(|way| self.free >> way & 1 == 1) else { return };
        self.at = match self.at {
            Spot::Start => Spot::Room(FIRST),
            Spot::Room(FIRST) if way == BACK => Spot::Start,
            Spot::Room(room) => Spot::Passage(room, way),
            Spot::Passage(room, ahead) if way == ahead => Spot::Room(room.wrapping_add_signed(STEPS[way])),
            Spot::Passage(room, _) => Spot::Room(room),
        };
    }

    /// Notes what stands in the agent's way, and the passages of a room.
    fn look_around(&mut self, observation: &[i32]) {
        let cell = |i: usize| observation.get(i).map_or(i32::from(WALL), |seen| *seen);
        self.free = 0;
        match self.at {
            Spot::Start => {
                // The window begins with the start where the way leads down or right.
                let ahead = self.actions[FORWARD];
                let ahead = if ahead % 2 == 1 { MIDDLE } else { LOOK[ahead] };
                self.free = u8::from(cell(ahead) == i32::from(FREE)) << FORWARD;
            }
            Spot::Passage(_, way) => self.free = 1 << way | 1 << OPPOSITE[way],
            Spot::Room(room) => {
                self.visited[room] = true;
                for (way, action) in self.actions.into_iter().enumerate() {
                    let next = room.wrapping_add_signed(STEPS[way]);
                    let seen = cell(LOOK[action]);
                    if seen == i32::from(GOAL) {
                        self.goal = Some((room, way));
                    } else if seen == i32::from(FREE) && self.holds(next) {
                        self.open[room] |= 1 << way;
                        let (least, most) = self.columns;
                        self.columns = (least.min(next % WIDTH), most.max(next % WIDTH));
                    }
                }
                self.free = self.open[room] | u8::from(room == FIRST) << BACK;
            }
        }
    }

    /// Goes this way, the only good one.
    fn only(&mut self, way: usize) -> Option<usize> {
        self.ties = 1 << way;
        Some(way)
    }

    /// Goes through the first door of the lowest cost; the directions of others that cost as much are as
    /// good.
    fn decide(&mut self, cost: impl Fn(&Door) -> u32) -> usize {
        let least = self.doors.iter().map(&cost).min().unwrap_or(0);
        let mut best = self.doors.iter().filter(|door| cost(door) == least).map(|door| usize::from(door.way));
        let way = best.next().unwrap_or(FORWARD);
        self.ties = best.fold(1 << way, |ties, way| ties | 1 << way);
        if let Spot::Room(room) = self.at {
            self.decided = Some(Spot::Passage(room, way));
        }
        way
    }

    /// Marks the actions that are as good as the one chosen last.
    fn accept(&self, choices: &mut [bool]) {
        for (_, action) in self.actions.into_iter().enumerate().filter(|(way, _)| self.ties >> way & 1 == 1) {
            if let Some(choice) = choices.get_mut(action) {
                *choice = true;
            }
        }
    }

    /// Finds all doors, from the room where the agent is or from both ends of a passage.
    fn find_doors(&mut self) {
        self.doors.clear();
        let from = |room: usize, way: u8| Some(Door { room: room as u8, distance: 0, way });
        let ends = match self.at {
            Spot::Start => [None, None],
            Spot::Room(room) => [from(room, NOWHERE), None],
            Spot::Passage(room, way) => {
                let ahead = room.wrapping_add_signed(STEPS[way]);
                [from(ahead, way as u8), from(room, OPPOSITE[way] as u8)]
            }
        };
        let mut seen = [false; ROOMS];
        let mut queue = [Door { room: 0, distance: 0, way: NOWHERE }; ROOMS];
        let (mut head, mut tail) = (0, 0);
        for end in ends.into_iter().flatten() {
            seen[usize::from(end.room)] = true;
            queue[tail] = end;
            tail += 1;
        }
        while head < tail {
            let here = queue[head];
            head += 1;
            let room = usize::from(here.room);
            if self.goal.map_or(!self.visited[room], |(before, _)| room == before) {
                self.doors.push(here);
                continue;
            }
            for way in (0..4).filter(|way| self.open[room] >> way & 1 == 1) {
                let next = room.wrapping_add_signed(STEPS[way]);
                if !std::mem::replace(&mut seen[next], true) {
                    let way = if here.way == NOWHERE { way as u8 } else { here.way };
                    queue[tail] = Door { room: next as u8, distance: here.distance + 1, way };
                    tail += 1;
                }
            }
        }
    }

    /// Fewest passages to every unvisited room from the nearest of the given ones, if all walls not seen were
    /// open.
    fn flood(&self, from: impl Iterator<Item = usize>) -> [u8; ROOMS] {
        let mut distances = [FAR; ROOMS];
        let mut queue = [0u8; ROOMS];
        let (mut head, mut tail) = (0, 0);
        for room in from.filter(|room| self.holds(*room) && !self.visited[*room]) {
            if distances[room] == FAR {
                (distances[room], queue[tail]) = (0, room as u8);
                tail += 1;
            }
        }
        while head < tail {
            let room = usize::from(queue[head]);
            head += 1;
            for step in STEPS {
                let next = room.wrapping_add_signed(step);
                if distances[next] == FAR && self.holds(next) && !self.visited[next] {
                    (distances[next], queue[tail]) = (distances[room] + 1, next as u8);
                    tail += 1;
                }
            }
        }
        distances
    }
}

/// A player that goes through the door with the shortest possible path to the goal, steps over unknown ground
/// counting one and a half: as the goal lies on the far side, before a room not visited yet, doors behind
/// which no such room can be reached are left alone.
#[derive(Debug, Clone)]
pub struct LabyrinthEscapePlayer(Map);

impl LabyrinthEscapePlayer {
    /// A player for the task of this difficulty.
    pub fn new(difficulty: Difficulty) -> Self {
        Self(Map::new(difficulty))
    }
}

impl Player for LabyrinthEscapePlayer {
    fn reset(&mut self) {
        self.0.reset();
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        let map = &mut self.0;
        let way = map.look(observation.ints).unwrap_or_else(|| {
            let hope = map.flood((0..WIDTH).map(|column| map.size * WIDTH + column));
            map.decide(|door| match hope[usize::from(door.room)] {
                FAR => u32::MAX,
                distance => 2 * u32::from(door.distance) + 3 * u32::from(distance),
            })
        });
        action.ints[0] = map.actions[way] as i32;
    }

    /// Observations show the action.
    fn took(&mut self, _: Values<'_>) {}

    /// The directions of all doors with the shortest possible path to the goal; anything where there is no
    /// way.
    fn accept(&mut self, choices: &mut [bool]) {
        self.0.accept(choices);
    }
}

/// A player that visits room after room. As all but the path to the last room is walked twice, that path
/// should be long: of all doors, the one that promises the longest is left for last, and of the others the
/// nearest comes first that does not lie the same way.
#[derive(Debug, Clone)]
pub struct LabyrinthExplorePlayer(Map);

impl LabyrinthExplorePlayer {
    /// A player for the task of this difficulty.
    pub fn new(difficulty: Difficulty) -> Self {
        Self(Map::new(difficulty))
    }
}

impl Player for LabyrinthExplorePlayer {
    fn reset(&mut self) {
        self.0.reset();
    }

    fn act(&mut self, observation: Values<'_>, action: ValuesMut<'_>) {
        let map = &mut self.0;
        let way = map.look(observation.ints).unwrap_or_else(|| {
            let last = last_way(map);
            if map.doors.iter().any(|door| door.way != last) {
                map.doors.retain(|door| door.way != last);
            }
            map.decide(|door| u32::from(door.distance))
        });
        action.ints[0] = map.actions[way] as i32;
    }

    /// Observations show the action.
    fn took(&mut self, _: Values<'_>) {}

    /// The directions of all doors that are equally near and do not lie the way that is left for last;
    /// anything when all rooms are visited.
    fn accept(&mut self, choices: &mut [bool]) {
        self.0.accept(choices);
    }
}

/// The direction of the door that promises the longest path. Depth behind a door is guessed as half the
/// rooms of the unknown ground there, shared among the doors that lead to it; guesses from sampled mazes did
/// no better.
fn last_way(map: &Map) -> u8 {
    let (mut longest, mut last) = (f64::NEG_INFINITY, NOWHERE);
    if map.doors.len() > 1 {
        for door in &map.doors {
            let ground = map.flood(std::iter::once(usize::from(door.room)));
            let size = ground.iter().filter(|distance| **distance != FAR).count();
            let sharing = map.doors.iter().filter(|other| ground[usize::from(other.room)] != FAR).count();
            let promise = f64::from(door.distance) + 0.5 * size as f64 / sharing.max(1) as f64;
            if promise > longest {
                (longest, last) = (promise, door.way);
            }
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use elmur_rng::Rng;

    use super::*;
    use crate::env::Env;
    use crate::popgym::LabyrinthEscape;
    use crate::popgym::labyrinth::WAYS;

    /// Place in the grid's bytes where a map believes the agent to be.
    fn believed(map: &Map, start: usize) -> usize {
        let room = |room: usize| [2 * (room / WIDTH) as isize - 1, 2 * (room % WIDTH) as isize - 18];
        let [ahead, aside] = match map.at {
            Spot::Start => [0, 0],
            Spot::Room(at) => room(at),
            Spot::Passage(at, way) => {
                let [ahead, aside] = room(at);
                [ahead + [-1, 1, 0, 0][way], aside + [0, 0, -1, 1][way]]
            }
        };
        let to = |way: usize, steps: isize| steps * WAYS[map.actions[way]];
        start.wrapping_add_signed(to(FORWARD, ahead) + to(3, aside))
    }

    #[test]
    fn the_map_says_where_the_agent_is_whoever_moves_it() {
        let mut rng = Rng::new(1, 0);
        for (difficulty, seed) in Difficulty::ALL.into_iter().flat_map(|d| (0..40).map(move |seed| (d, seed)))
        {
            let mut env = LabyrinthEscape::new(difficulty);
            let mut player = LabyrinthEscapePlayer::new(difficulty);
            let (mut seen, mut action) = ([0; 10], [0]);
            env.reset(seed, ValuesMut::ints(&mut seen)).unwrap();
            player.reset();
            let start = env.0.at;
            for t in 0.. {
                player.act(Values::ints(&seen), ValuesMut::ints(&mut action));
                assert_eq!(believed(&player.0, start), env.0.at, "{difficulty:?}, seed {seed}, step {t}");
                if rng.below(3) > 0 {
                    action[0] = rng.below(4) as i32;
                    player.took(Values::ints(&action));
                }
                if env.step(Values::ints(&action), ValuesMut::ints(&mut seen)).unwrap().done() {
                    break;
                }
            }
        }
    }

    /// Moved up to twelve steps away from the room before the goal, the player needs no more than one more.
    #[test]
    fn a_goal_that_was_seen_is_found_again() {
        let mut env = LabyrinthEscape::new(Difficulty::Medium);
        let mut player = LabyrinthEscapePlayer::new(Difficulty::Medium);
        let mut longest = 0;
        for seed in 0..50 {
            let (mut seen, mut action) = ([0; 10], [0]);
            env.reset(seed, ValuesMut::ints(&mut seen)).unwrap();
            player.reset();
            let (mut rng, mut foreign, mut own) = (Rng::new(seed, 1), 12, 0);
            loop {
                player.act(Values::ints(&seen), ValuesMut::ints(&mut action));
                if player.0.goal.is_some() && foreign > 0 {
                    foreign -= 1;
                    action[0] = rng.below(4) as i32;
                    player.took(Values::ints(&action));
                } else if foreign == 0 {
                    own += 1;
                }
                if env.step(Values::ints(&action), ValuesMut::ints(&mut seen)).unwrap().done() {
                    break;
                }
            }
            assert!(own <= 13, "seed {seed}: {own}");
            longest = longest.max(own);
        }
        assert!(longest > 3, "{longest}");
    }
}
