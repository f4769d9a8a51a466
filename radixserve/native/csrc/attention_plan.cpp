// See attention_plan.h. Plain integer work, a few microseconds a step; it reads page ids but neither K nor V.
#include "attention_plan.h"

#include <algorithm>
#include <cstring>

namespace radixserve {
namespace {

int blocks_of(int num_keys) { return (num_keys + BLOCK - 1) / BLOCK; }

// whole blocks of a row: those in which rows can be compared page by page
bool has_whole_block(const Step& step, int row, int block) { return (block + 1) * BLOCK <= step.seq_lens[row]; }

bool is_same_block(const Step& step, int a, int b, int block) {
    const int first = block * BLOCK / step.page_size, last = ((block + 1) * BLOCK - 1) / step.page_size;
    const int32_t *pages_a = step.kv_indices + step.kv_indptr[a], *pages_b = step.kv_indices + step.kv_indptr[b];
    return std::memcmp(pages_a + first, pages_b + first, (last - first + 1) * sizeof(int32_t)) == 0;
}

// time of one KV head, in arbitrary units: bringing in the keys costs about as much as a few rows' products
float tile_cost(const Step& step, const Tile& tile) {
    return float(tile.num_keys - tile.block_begin * BLOCK) * (tile.num_queries * step.group_size + 12);
}

}  // namespace

void Plan::make(const Step& step) {
    tokens.clear(), positions.clear(), tiles.clear(), units.clear(), pieces.clear(), merges.clear();
    num_partials = 0, num_shared_tiles = 0;
    max_queries = std::max(1, MAX_TILE_ROWS / step.group_size);
    std::vector<int> single_rows;
    for (int row = 0; row < step.num_rows; ++row) {
        const int begin = step.qo_indptr[row], end = step.qo_indptr[row + 1], first_position = step.seq_lens[row] - (end - begin);
        if (end - begin == 1) {
            single_rows.push_back(row);
            continue;
        }
        for (int query = 0; query < end - begin; query += max_queries) {
            std::vector<int> of_tile, at;
            const int past = std::min(query + max_queries, end - begin);
            for (int i = query; i < past; ++i) of_tile.push_back(begin + i), at.push_back(first_position + i);
            add_tile(row, 0, blocks_of(at.back() + 1), of_tile, at);
        }
    }
    share(step, single_rows, 0, max_queries);
    add_units(step);
    add_merges();
}

void Plan::add_tile(int row, int block_begin, int block_end, const std::vector<int>& of_tile, const std::vector<int>& at) {
    const int num_keys = std::min(at.back() + 1, block_end * BLOCK);
    const bool is_whole = block_begin == 0 && at.back() < block_end * BLOCK;
    tiles.push_back({row, block_begin, block_end, int(tokens.size()), int(of_tile.size()), num_keys, is_whole, -1});
    tokens.insert(tokens.end(), of_tile.begin(), of_tile.end());
    positions.insert(positions.end(), at.begin(), at.end());
}

// rows with one query each, whose pages are the same before `block`: those that stay together read their blocks as one tile
void Plan::share(const Step& step, std::vector<int> rows, int block, int max_queries) {
    while (!rows.empty()) {
        const int first = rows[0];
        std::vector<int> together, others;
        const bool can_share = step.is_shared_once && has_whole_block(step, first, block);
        for (const int row : rows) {
            const bool is_with = row == first || (can_share && int(together.size()) < max_queries && has_whole_block(step, row, block) &&
                                                  is_same_block(step, first, row, block));
            (is_with ? together : others).push_back(row);
        }
        int end = blocks_of(step.seq_lens[first]);
        if (together.size() > 1) {
            const auto goes_on = [&](int at) {
                return std::all_of(together.begin(), together.end(), [&](int row) {
                    return has_whole_block(step, row, at) && is_same_block(step, first, row, at);
                });
            };
            for (end = block + 1; goes_on(end);) ++end;
            ++num_shared_tiles;
        }
        std::vector<int> of_tile, at, unfinished;
        for (const int row : together) {
            of_tile.push_back(step.qo_indptr[row]), at.push_back(step.seq_lens[row] - 1);
            if (end * BLOCK < step.seq_lens[row]) unfinished.push_back(row);
        }
        add_tile(first, block, end, of_tile, at);
        share(step, unfinished, end, max_queries);
        rows = others;
    }
}

void Plan::add_units(const Step& step) {
    float total = 0;
    for (const Tile& tile : tiles) total += tile_cost(step, tile) * step.num_kv_heads;
    const float wanted = step.num_threads > 1 ? total / (4 * step.num_threads) : total;
    for (int i = 0; i < int(tiles.size()); ++i) {
        Tile& tile = tiles[i];
        const std::vector<Unit> of_tile = cut(step, i, wanted);
        units.insert(units.end(), of_tile.begin(), of_tile.end());
        if (tile.is_whole && of_tile[0].block_end == tile.block_end) continue;
        tile.partials = num_partials;
        num_partials += int64_t(tile.block_end - tile.block_begin) * step.num_kv_heads * tile.num_queries * step.group_size;
    }
    // the longest first: what is left for the end is short
    std::stable_sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.cost > b.cost; });
}

// into pieces that cost about `wanted`: narrow tiles by blocks, each with all its heads, since those lie side by side in memory, even if the
// pieces are too large, as long as every thread has two; others, and where there are too few blocks, by heads as well
std::vector<Unit> Plan::cut(const Step& step, int index, float wanted) const {
    const Tile& tile = tiles[index];
    const float cost = tile_cost(step, tile) * step.num_kv_heads;
    const bool is_narrow = tile.num_queries * step.group_size <= MAX_NARROW_ROWS;
    const int num_blocks = tile.block_end - tile.block_begin, num_wanted = std::max(1, int(cost / wanted + 0.75f));
    const bool has_all_heads = is_narrow && (num_wanted <= num_blocks || num_blocks >= 2 * step.num_threads);
    const int num_heads = has_all_heads ? step.num_kv_heads : 1, num_head_cuts = step.num_kv_heads / num_heads;
    const int num_cuts = std::min(num_blocks, (num_wanted + num_head_cuts - 1) / num_head_cuts);
    std::vector<Unit> units;
    for (int i = 0; i < num_cuts; ++i) {
        const int begin = tile.block_begin + num_blocks * i / num_cuts, end = tile.block_begin + num_blocks * (i + 1) / num_cuts;
        for (int head = 0; head < step.num_kv_heads; head += num_heads)
            units.push_back({index, head, head + num_heads, begin, end, cost / (num_cuts * num_head_cuts)});
    }
    return units;
}

void Plan::add_merges() {
    struct Entry {
        int token, block, tile, query;
    };
    std::vector<Entry> entries;
    for (int i = 0; i < int(tiles.size()); ++i) {
        if (tiles[i].partials < 0) continue;
        for (int query = 0; query < tiles[i].num_queries; ++query)
            entries.push_back({tokens[tiles[i].first_query + query], tiles[i].block_begin, i, query});
    }
    std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
        return a.token != b.token ? a.token < b.token : a.block < b.block;
    });
    for (const Entry& entry : entries) {
        if (merges.empty() || merges.back().token != entry.token) merges.push_back({entry.token, int(pieces.size()), 0});
        pieces.push_back({entry.tile, entry.query});
        ++merges.back().num_pieces;
    }
}

}  // namespace radixserve
