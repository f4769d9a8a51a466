// Drives native/csrc/team.h: jobs of many tiny phases, each reading all of what the one before it wrote. Arguments: threads, jobs, phases of a
// job, a seed. Exits 1 with a line on stderr when a piece ran twice, not at all, in the wrong phase, or saw old numbers, when the
// caller's helpers did not do their share, when what a piece threw did not arrive, or when a fork could not run, resize and drop its teams.
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>

#include "team.h"

using namespace radixserve;

namespace {

constexpr int MOST_PIECES = 13;

struct Chain final : Work {
    // plain memory: only the team's own ordering keeps readers and writers apart
    uint64_t values[2][MOST_PIECES] = {};
    int64_t counts[2] = {1, 1};
    int runs[MOST_PIECES] = {};
    bool is_busy[64] = {};
    std::atomic<int> num_wrong{0};
    int slow_worker = -1, effort = 0;
    std::atomic<int> num_by_helpers{0};

    static uint64_t mix(uint64_t x) { return (x ^ (x >> 31)) * 0x9e3779b97f4a7c15ull + 1; }

    void run(const Phase& phase, int worker, int64_t piece) override {
        if (is_busy[worker] || piece < 0 || piece >= phase.num_pieces) ++num_wrong;
        is_busy[worker] = true;
        if (worker == slow_worker) std::this_thread::sleep_for(std::chrono::microseconds(50));
        const int from = phase.layer % 2, to = 1 - from;
        uint64_t sum = uint64_t(phase.layer) * 1000003 + piece;
        for (int64_t i = 0; i < counts[from]; ++i) sum = mix(sum + values[from][i]);
        for (int i = 0; i < effort; ++i) sum = mix(sum);
        values[to][piece] = sum;
        if (worker > 0) num_by_helpers.fetch_add(1, std::memory_order_relaxed);
        ++runs[piece];
        is_busy[worker] = false;
        if (piece == 0) counts[to] = phase.num_pieces;
    }
};

// the same, in one loop
void expected(const std::vector<Phase>& phases, Chain& chain) {
    for (const Phase& phase : phases)
        for (int64_t piece = 0; piece < phase.num_pieces; ++piece) chain.run(phase, 0, piece);
}

struct Throwing final : Work {
    std::atomic<int> num_late{0};
    void run(const Phase& phase, int, int64_t piece) override {
        if (phase.layer > 3) ++num_late;
        if (phase.layer == 3 && piece % 3 == 1) throw std::runtime_error("a piece");
    }
};

bool arrives(Team& team) {
    double seconds = 0;
    std::vector<Phase> phases;
    for (int i = 0; i < 8; ++i) phases.push_back({0, i, 7, &seconds});
    for (int job = 0; job < 20; ++job) {
        Throwing throwing;
        try {
            team.run(phases, throwing);
            return false;
        } catch (const std::runtime_error&) {
        }
        if (throwing.num_late) return false;
    }
    return true;
}

bool is_right_job(Team& team) {
    double seconds = 0;
    std::vector<Phase> phases;
    for (int i = 0; i < 40; ++i) phases.push_back({0, i, 1 + i % MOST_PIECES, &seconds});
    Chain got, wanted;
    team.run(phases, got);
    expected(phases, wanted);
    for (int i = 0; i < MOST_PIECES; ++i)
        if (got.runs[i] != wanted.runs[i] || got.values[0][i] != wanted.values[0][i]) return false;
    return got.num_wrong == 0;
}

// the race detector has no threads after a fork
bool works_in_a_fork(Team& team, int num_threads) {
#if defined(__SANITIZE_THREAD__)
    return true;
#endif
    auto *shrinks = new Team, *grows = new Team, *dropped = new Team;
    for (Team* one : {shrinks, grows, dropped}) one->resize(num_threads), is_right_job(*one);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // helpers are asleep on their condition variable
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);  // ends a child that hangs
        delete dropped;
        shrinks->resize(1), grows->resize(num_threads + 1);
        const bool is_right = is_right_job(team) && is_right_job(*shrinks) && is_right_job(*grows);
        delete shrinks, delete grows;
        _exit(is_right ? 0 : 1);
    }
    int status = 1;
    waitpid(child, &status, 0);
    const bool is_right = is_right_job(*dropped);
    delete shrinks, delete grows, delete dropped;
    return status == 0 && is_right;
}

}  // namespace

int main(int, char** arguments) {
    const int num_threads = std::atoi(arguments[1]), num_jobs = std::atoi(arguments[2]), num_phases = std::atoi(arguments[3]);
    std::mt19937 random(std::atoi(arguments[4]));
    Team team;
    double seconds = 0;
    int64_t num_by_helpers = 0, num_pieces = 0;
    for (int job = 0; job < num_jobs; ++job) {
        if (job % 50 == 0) team.resize(1 + random() % num_threads);
        if (job % 50 == 1) team.resize(num_threads);
        std::vector<Phase> phases;
        for (int i = 0; i < num_phases; ++i) phases.push_back({0, i, int64_t(1 + random() % MOST_PIECES), &seconds});
        Chain got, wanted;
        got.slow_worker = num_threads == 1 ? -1 : job % 10 == 9 ? int(random() % num_threads) : job % 10 == 4 ? 0 : -1;  // now and then somebody always comes late
        got.effort = wanted.effort = job % 3 * 300;
        team.run(phases, got);
        num_by_helpers += got.num_by_helpers;
        for (const Phase& phase : phases) num_pieces += phase.num_pieces;
        expected(phases, wanted);
        bool is_right = got.num_wrong == 0;
        for (int i = 0; i < MOST_PIECES; ++i)
            is_right = is_right && got.runs[i] == wanted.runs[i] && got.values[0][i] == wanted.values[0][i] && got.values[1][i] == wanted.values[1][i];
        if (!is_right) return std::fprintf(stderr, "job %d of %d threads went wrong\n", job, num_threads), 1;
        if (job % 20 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));  // let the helpers fall asleep
    }
    if (num_threads > 1 && num_by_helpers < num_pieces / 20)
        return std::fprintf(stderr, "helpers did %d of %d pieces\n", int(num_by_helpers), int(num_pieces)), 1;
    if (!arrives(team) || !is_right_job(team)) return std::fprintf(stderr, "what a piece threw did not arrive, or left something behind\n"), 1;
    if (!works_in_a_fork(team, num_threads)) return std::fprintf(stderr, "a fork's teams hang or compute wrongly\n"), 1;
    Cuts cuts;
    for (int64_t count : {0, 1, 2, 7, 96, 4128}) {
        cuts.make(count, num_threads, 1 + count % 3);
        int64_t at = 0;
        for (int64_t piece = 0; piece < cuts.size(); at = cuts.end(piece++))
            if (cuts.first(piece) != at || cuts.end(piece) <= at) return std::fprintf(stderr, "a hole in the cuts of %d\n", int(count)), 1;
        if (at != count) return std::fprintf(stderr, "cuts of %d end at %d\n", int(count), int(at)), 1;
    }
    return seconds > 0 ? 0 : 1;
}
