// A team of threads that works through the phases of a job. A phase ends when all of its pieces are done, whoever did them: a thread that
// has no core holds nobody up unless it sits in the middle of a piece, and one that never woke up is not waited for, not even at the end.
//
// Why it is right. One word holds the number of the phase (never used twice) and how many of its pieces nobody has taken yet.
//   - A piece is taken by compare-and-swap on that word. Whoever succeeds holds the phase open, so what belongs to the job (phases_, phase_,
//     work_) stands still until it says that the piece is done; nobody looks at these without a piece in hand. A late thread needs no
//     catching up: what it takes is of the phase that is open now. A stale word fails, since the number of its phase is gone.
//   - Whoever does the last piece, by the count in num_done_, opens the next phase; at that time no other thread has a piece.
//   - What pieces wrote is seen by the next phase: each one's writes are released by its fetch_add on num_done_, the last fetch_add acquires
//     them all (they are one release sequence), and it releases the word, which whoever takes a piece acquires (through other threads'
//     compare-and-swaps, which belong to the same release sequence). The caller of run() acquires the word that ends the job.
//   - A piece that throws counts as done, and those after it are not begun; the first exception is released and acquired as results are.
//   - Sleep is not missed: a sleeper announces itself (num_asleep_), then looks at the word; whoever opens a phase writes the word, then
//     looks for sleepers. Both are sequentially consistent, so at least one sees the other. The mutex closes the gap before the sleep.
#pragma once
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace radixserve {

struct Phase {
    int kind, layer;     // the work knows what they mean
    int64_t num_pieces;  // 1 to 2^24 - 1
    double* seconds;     // its wall time is added here
};

class Work {
public:
    // Pieces of a phase run at the same time, in any order. `worker`: below the team's size, of one thread at a time. May throw.
    virtual void run(const Phase& phase, int worker, int64_t piece) = 0;

protected:
    ~Work() = default;
};

// `count` things of equal cost, cut for a phase: long pieces first, which read memory in one stream, and short ones at the end, so that
// nobody waits for long. None is so long that a prompt's step waits for a thread that lost its core with a quarter of a phase in hand.
class Cuts {
    static constexpr int64_t LONGEST = 64;

public:
    void make(int64_t count, int num_threads, int64_t least = 1) {
        ends_.assign(1, 0);
        for (int64_t at = 0; at < count;) {
            const int64_t rest = count - at, wanted = num_threads == 1 ? rest : rest / (2 * num_threads);
            at += std::min(rest, std::max(least, num_threads == 1 ? wanted : std::min(wanted, LONGEST)));
            ends_.push_back(at);
        }
    }
    int64_t size() const { return int64_t(ends_.size()) - 1; }
    int64_t first(int64_t piece) const { return ends_[piece]; }
    int64_t end(int64_t piece) const { return ends_[piece + 1]; }

private:
    std::vector<int64_t> ends_{0};
};

// The threads of a team and all that they share.
class Crew {
    // A thread sleeps after so long without work. Longer than the tail of a phase; and short, since the one that is waited for may be
    // queued behind this one's core, where it goes on as soon as the core is free.
    static constexpr std::chrono::microseconds SPIN{20};
    static constexpr int PIECE_BITS = 24;

public:
    // size - 1 threads, or fewer where the system gives no more
    explicit Crew(int size) {
        // signals are for the threads that were there before
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (int id = 1; id < size; ++id) helpers_.emplace_back([this, id] { help(id); });
        } catch (const std::exception&) {
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }
    Crew(const Crew&) = delete;
    ~Crew() {
        {
            std::lock_guard<std::mutex> guard(mutex_);
            is_stopping_.store(true, std::memory_order_release);
        }
        helper_.notify_all();
        for (std::thread& helper : helpers_) helper.join();
    }

    void run(const std::vector<Phase>& phases, Work& work) {
        last_ = now();
        if (helpers_.empty()) return run_alone(phases, work);
        phases_ = phases.data(), num_phases_ = phases.size(), phase_ = 0, work_ = &work;
        const uint64_t end = number_ + 1 + num_phases_;
        open(phases[0].num_pieces);
        for (uint64_t word; (word = word_.load(std::memory_order_acquire)) >> PIECE_BITS != end;) {
            if (!take(0)) wait(caller_, [=](uint64_t now) { return untaken(now) != 0 || now >> PIECE_BITS == end; });
        }
        if (!has_failed_.load(std::memory_order_relaxed)) return;
        has_failed_.store(false, std::memory_order_relaxed);
        std::rethrow_exception(std::exchange(failure_, nullptr));
    }

private:
    static double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
    static int64_t untaken(uint64_t word) { return int64_t(word & ((uint64_t(1) << PIECE_BITS) - 1)); }

    void run_alone(const std::vector<Phase>& phases, Work& work) {
        for (const Phase& phase : phases) {
            for (int64_t piece = 0; piece < phase.num_pieces; ++piece) work.run(phase, 0, piece);
            lap(phase);
        }
    }

    void lap(const Phase& phase) {
        const double at = now();
        *phase.seconds += at - last_;
        last_ = at;
    }

    void help(int id) {
        while (!is_stopping_.load(std::memory_order_acquire)) {
            if (!take(id)) wait(helper_, [this](uint64_t now) { return untaken(now) != 0 || is_stopping_.load(std::memory_order_acquire); });
        }
    }

    // one piece of the open phase. False: there is none that nobody has taken
    bool take(int worker) {
        uint64_t word = word_.load(std::memory_order_acquire);
        do {
            if (untaken(word) == 0) return false;
        } while (!word_.compare_exchange_weak(word, word - 1, std::memory_order_acquire, std::memory_order_acquire));
        const Phase& phase = phases_[phase_];
        const int64_t num_pieces = phase.num_pieces;
        attempt(phase, worker, num_pieces - untaken(word));
        if (num_done_.fetch_add(1, std::memory_order_acq_rel) + 1 != num_pieces) return true;
        lap(phase);
        num_done_.store(0, std::memory_order_relaxed);  // released with the word
        ++phase_;
        open(phase_ < num_phases_ ? phases_[phase_].num_pieces : 0);
        return true;
    }

    void attempt(const Phase& phase, int worker, int64_t piece) {
        if (has_failed_.load(std::memory_order_relaxed)) return;
        try {
            work_->run(phase, worker, piece);
        } catch (...) {
            if (!has_failed_.exchange(true, std::memory_order_relaxed)) failure_ = std::current_exception();
        }
    }

    // The next phase; without pieces, the end of the job. Whoever opens a phase goes on to take its pieces, so a single piece wakes nobody.
    void open(int64_t num_pieces) {
        ++number_;
        word_.store(number_ << PIECE_BITS | uint64_t(num_pieces), std::memory_order_seq_cst);
        if (num_pieces == 1 || num_asleep_.load(std::memory_order_seq_cst) == 0) return;
        { std::lock_guard<std::mutex> guard(mutex_); }
        caller_.notify_one();
        if (num_pieces > 1) helper_.notify_all();
    }

    template <class IsReady>
    void wait(std::condition_variable& condition, const IsReady& is_ready) {
        const auto start = std::chrono::steady_clock::now();
        do {
            for (int i = 0; i < 16; ++i) {
                if (is_ready(word_.load(std::memory_order_acquire))) return;
#if defined(__x86_64__)
                _mm_pause();
#endif
            }
        } while (std::chrono::steady_clock::now() - start < SPIN);
        std::unique_lock<std::mutex> lock(mutex_);
        num_asleep_.fetch_add(1, std::memory_order_seq_cst);
        while (!is_ready(word_.load(std::memory_order_seq_cst))) condition.wait(lock);
        num_asleep_.fetch_sub(1, std::memory_order_relaxed);
    }

    // apart from each other: one is polled while the other counts
    alignas(64) std::atomic<uint64_t> word_{0};
    alignas(64) std::atomic<int64_t> num_done_{0};
    alignas(64) std::atomic<int> num_asleep_{0};
    std::atomic<bool> is_stopping_{false};
    std::mutex mutex_;
    std::condition_variable caller_, helper_;
    // the job: see above who may look at it
    const Phase* phases_ = nullptr;
    size_t num_phases_ = 0, phase_ = 0;
    Work* work_ = nullptr;
    std::atomic<bool> has_failed_{false};
    std::exception_ptr failure_;
    uint64_t number_ = 0;
    double last_ = 0;
    std::vector<std::thread> helpers_;  // the caller's own
};

class Team {
public:
    Team() = default;
    Team(const Team&) = delete;
    ~Team() { part(); }

    // Threads beside the caller of run(): size - 1, or fewer where the system gives no more. Not during run().
    void resize(int size) {
        if (size == size_) return;
        part();
        size_ = size;
    }

    int size() const { return size_; }

    // Returns when all phases are done, in order, or throws the first thing that a piece threw. One caller at a time.
    void run(const std::vector<Phase>& phases, Work& work) {
        if (phases.empty()) return;
        if (getpid() != process_) part();
        if (crew_ == nullptr) crew_ = std::make_unique<Crew>(size_), process_ = getpid();
        crew_->run(phases, work);
    }

private:
    // A fork has the memory of its parent's crew and none of its threads. To end it would wait for them, be it only in the destructor of a
    // condition variable: it is left where it is.
    void part() {
        if (getpid() != process_) static_cast<void>(crew_.release());
        crew_.reset();
    }

    std::unique_ptr<Crew> crew_;
    int size_ = 1;
    pid_t process_ = 0;
};

}  // namespace radixserve
