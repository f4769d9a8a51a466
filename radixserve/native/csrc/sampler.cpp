// Draws one token of a row of logits: what runner/sampler.py says, in a few passes over memory that stays in the cache. A row's token depends
// on its own numbers alone.
#include <algorithm>
#include <cfloat>
#include <vector>

#include "door.h"
#include "vec.h"

namespace radixserve {
namespace {

constexpr int64_t SUM_BLOCK = 512;
// of logits, by how far they lie below the largest; the last one takes all that are farther
constexpr int NUM_BUCKETS = 4096;
constexpr float BUCKETS_OF_ONE = 128;

// kept: logits above it, and of its equals ids up to last_id
struct Cut {
    float logit;
    int64_t last_id;
};

class Sampler {
public:
    // token of `logits`, or -1 where none is finite
    int64_t draw(const float* logits, int64_t n, float temperature, int64_t top_k, double top_p, float min_p, double uniform) {
        const float largest = clean(logits, n);
        if (largest == MINUS_INFINITY) return -1;
        largest_ = largest;
        weigh(largest, temperature);
        if (top_k < n || top_p < 1.0) keep(cut_of(top_k, top_p));
        if (min_p > 0)  // the largest weight is 1
            for (int64_t id = 0; id < n_; ++id) weights_[id] = weights_[id] >= min_p ? weights_[id] : 0.0f;
        return at(uniform);
    }

private:
    struct Item {
        float logit;
        int32_t id;
    };

    // NaN counts as minus infinity, infinity as the largest float, and -0 as 0. The largest of all.
    float clean(const float* logits, int64_t n) {
        n_ = n;
        padded_ = (n + SUM_BLOCK - 1) / SUM_BLOCK * SUM_BLOCK;
        logits_.resize(padded_), weights_.resize(padded_);
        std::copy(logits, logits + n, logits_.begin());
        std::fill(logits_.begin() + n, logits_.end(), MINUS_INFINITY);
        const Vec lowest = broadcast(MINUS_INFINITY), highest = broadcast(FLT_MAX);
        Vec largest = lowest;
        for (int64_t i = 0; i < padded_; i += VL) {
            const Vec x = load(&logits_[i]), bounded = x > highest ? highest : x;
            const Vec cleaned = (x == x ? bounded : lowest) + Vec{};
            store(&logits_[i], cleaned);
            largest = max_of(largest, cleaned);
        }
        return max_of(largest);
    }

    void weigh(float largest, float temperature) {
        const Vec log2_e = broadcast(1.44269504f), divisor = broadcast(temperature), most = broadcast(largest);
        for (int64_t i = 0; i < padded_; i += VL) store(&weights_[i], exp2_of((load(&logits_[i]) - most) / divisor * log2_e));
    }

    void keep(Cut cut) {
        const int64_t end = std::min(cut.last_id + 1, n_);
        for (int64_t id = 0; id < end; ++id) weights_[id] = logits_[id] >= cut.logit ? weights_[id] : 0.0f;
        for (int64_t id = end; id < n_; ++id) weights_[id] = logits_[id] > cut.logit ? weights_[id] : 0.0f;
    }

    // The likeliest come first, among equals the lower id: top_k of them, and of these the shortest run whose mass reaches top_p of theirs.
    // Buckets tell where a cut falls; only that one is sorted.
    Cut cut_of(int64_t top_k, double top_p) {
        fill_buckets();
        int64_t most = n_;
        double total = 0;
        for (const double mass : masses_) total += mass;
        if (top_k < n_) {
            most = top_k, total = 0;
            int64_t rest = most;
            int bucket = 0;
            for (; counts_[bucket] < rest; ++bucket) rest -= counts_[bucket], total += masses_[bucket];
            sort(bucket);
            for (int64_t i = 0; i < rest; ++i) total += weights_[items_[i].id];
            if (top_p >= 1.0) return {items_[rest - 1].logit, items_[rest - 1].id};
        }
        const double needed = top_p * total;
        double before = 0;
        int64_t count = 0;
        for (int bucket = 0; bucket < NUM_BUCKETS; ++bucket) {
            if (counts_[bucket] == 0) continue;
            if (before + masses_[bucket] < needed && count + counts_[bucket] < most) {
                before += masses_[bucket], count += counts_[bucket];
                continue;
            }
            sort(bucket);
            for (const Item& item : items_) {
                before += weights_[item.id];
                if (before >= needed || ++count >= most) return {item.logit, item.id};
            }
        }
        return {MINUS_INFINITY, n_};
    }

    void fill_buckets() {
        buckets_.resize(n_), counts_.assign(NUM_BUCKETS, 0), masses_.assign(NUM_BUCKETS, 0.0);
        for (int64_t id = 0; id < n_; ++id)
            buckets_[id] = int32_t(std::min((largest_ - logits_[id]) * BUCKETS_OF_ONE, float(NUM_BUCKETS - 1)));
        for (int64_t id = 0; id < n_; ++id) ++counts_[buckets_[id]], masses_[buckets_[id]] += weights_[id];
    }

    void sort(int bucket) {
        items_.clear();
        for (int64_t id = 0; id < n_; ++id)
            if (buckets_[id] == bucket) items_.push_back({logits_[id], int32_t(id)});
        std::sort(items_.begin(), items_.end(), [](const Item& a, const Item& b) { return a.logit != b.logit ? a.logit > b.logit : a.id < b.id; });
    }

    // the first id at which the running sum of weights exceeds `uniform` of the whole
    int64_t at(double uniform) {
        sums_.clear();
        double total = 0;
        for (int64_t first = 0; first < padded_; first += SUM_BLOCK) {
            double lanes[8] = {};
            for (int64_t i = 0; i < SUM_BLOCK; i += 8)
                for (int lane = 0; lane < 8; ++lane) lanes[lane] += weights_[first + i + lane];
            sums_.push_back(((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7])));
            total += sums_.back();
        }
        const double target = uniform * total;
        double before = 0;
        int64_t last = 0;
        for (size_t block = 0; block < sums_.size(); ++block) {
            if (before + sums_[block] > target) {
                double sum = before;
                for (int64_t id = int64_t(block) * SUM_BLOCK; id < int64_t(block + 1) * SUM_BLOCK; ++id) {
                    if (weights_[id] == 0.0f) continue;
                    last = id;
                    if ((sum += weights_[id]) > target) return id;
                }
            }
            before += sums_[block];
        }
        return last;  // two orders of summation may differ in the last bit
    }

    int64_t n_ = 0, padded_ = 0;
    std::vector<float> logits_, weights_;
    float largest_ = 0;
    std::vector<int32_t> counts_, buckets_;
    std::vector<double> masses_, sums_;
    std::vector<Item> items_;
};

}  // namespace
}  // namespace radixserve

// Rows `rows` [n] of logits [.., vocab_size], `stride` apart; the settings are [n], top_k at least vocab_size where it is off. Writes
// token_ids[row] of each, -1 where no logit is finite. A Status (door.h).
RADIXSERVE_DOOR int radixserve_sample(
    int64_t n, const int64_t* rows, const float* logits, int64_t stride, int64_t vocab_size, const float* temperature, const int64_t* top_k,
    const double* top_p, const float* min_p, const double* uniform, int64_t* token_ids
) {
    return radixserve::status_of([&] {
        radixserve::Sampler sampler;
        for (int64_t i = 0; i < n; ++i)
            token_ids[rows[i]] = sampler.draw(logits + rows[i] * stride, vocab_size, temperature[i], top_k[i], top_p[i], min_p[i], uniform[i]);
    });
}
