// Flash attention's forward pass (arXiv 2205.14135, 2307.08691).
//
// Of a tile of queries, the scores with a block of keys are computed, become powers of two above the largest score so
// far, and weigh the block's values; what was summed before is scaled to the new largest score. A block ends with the
// last key that a query of the tile sees, and only keys that some of its queries do not see are masked.

#include "attention_tiles.h"

namespace te_models {

struct Forward {
  Sizes s;
  const X *q, *k, *v;
  Strides q_at, k_at, v_at, out_at, sum_at;
  X* out;
  float* logsumexp;
  Scale scale;
};

template <int vectors>
void attend(const Forward& f, int64_t batch, int64_t group, const Tile& tile, const float* keys, const float* values,
            int64_t all_deep, float* queries, float* scores, float* probabilities, float* results) {
  const Sizes& s = f.s;
  const int64_t deep = s.channels / kDeep;
  pack_tile(f.q, f.q_at, s, batch, group, tile, s.channels, queries);
  Floats top[vectors], total[vectors];
  for (int v = 0; v < vectors; ++v) top[v] = all(-kInfinity), total[v] = zero();
  for (int64_t begin = tile.first; begin < tile.end; begin += kKeys) {
    const int64_t rows = up_to(std::min(kKeys, tile.end - begin), kTall);
    Floats largest[vectors], factor[vectors], base[vectors];
    for (int v = 0; v < vectors; ++v) largest[v] = all(-kInfinity);
    scores_of<vectors>(tile, queries, keys, begin, rows, deep, f.scale.of_cap, scores, largest);
    for (int v = 0; v < vectors; ++v) {
      const Floats next = larger(top[v], mul(largest[v], all(f.scale.of_power)));
      base[v] = where_at_most(next, all(-kInfinity), zero(), next);  // nothing but minus infinity: all powers are zero
      factor[v] = exp2(sub(top[v], base[v]));
      base[v] = sub(zero(), base[v]);
      top[v] = next;
      total[v] = mul(total[v], factor[v]);
    }
    for (int64_t r = 0; r < rows; r += kDeep)
      for (int v = 0; v < vectors; ++v) {
        Floats p[kDeep];
        for (int i = 0; i < kDeep; ++i) {
          p[i] = exp2(fma(load(scores + ((r + i) * vectors + v) * kLanes), all(f.scale.of_power), base[v]));
          total[v] = add(total[v], p[i]);
        }
        store(probabilities + (r / kDeep * vectors + v) * kLanes, kDeep == 2 ? paired(p[0], p[kDeep - 1]) : p[0]);
      }
    add_rows<vectors>(values + begin / kDeep * kLanes, all_deep, probabilities, rows / kDeep, s.values, factor,
                      begin == tile.first, results);
  }
  float tops[kTileLanes], totals[kTileLanes];
  for (int v = 0; v < vectors; ++v) store(tops + v * kLanes, top[v]), store(totals + v * kLanes, total[v]);
  X* rows[kTileLanes];
  for (int64_t i = 0; i < tile.count; ++i) {
    rows[i] = row_of(f.out, f.out_at, s, batch, group, tile.begin + i);
    *row_of(f.logsumexp, f.sum_at, s, batch, group, tile.begin + i) = tops[i] * kLn2 + std::log(totals[i]);
    totals[i] = 1.0f / totals[i];
  }
  unpack_tile(results, rows, tile.count, s.values, vectors, totals);
}

void forward(const Forward& f, int threads) {
  const Sizes& s = f.s;
  const int64_t panels = (s.keys + kLanes - 1) / kLanes, deep = panels * kLanes / kDeep;
  const int64_t of_keys = panels * kLanes * (s.channels / kDeep), of_values = deep * s.values;
  const int64_t pairs = s.batch * s.groups, together = std::min<int64_t>(threads, pairs);
  const int64_t tiles = (s.rows() + kTileLanes - 1) / kTileLanes;
  const Buffer packed = buffer(together * (of_keys + of_values));
  for (int64_t first = 0; first < pairs; first += together) {  // key heads, as many as there are threads
    const int64_t some = std::min(together, pairs - first);
#pragma omp parallel num_threads(threads)
    {
      const Buffer queries = buffer(kTileLanes * (s.channels / kDeep)), results = buffer(kTileLanes * s.values);
      const Buffer scores = buffer(kTileLanes * kKeys), probabilities = buffer(kTileLanes * (kKeys / kDeep));
#pragma omp for
      for (int64_t i = 0; i < some * panels; ++i) {
        const int64_t pair = first + i / panels, batch = pair / s.groups, group = pair % s.groups;
        float* const to = packed.get() + i / panels * (of_keys + of_values);
        pack_keys_across(f.k + batch * f.k_at.batch + group * f.k_at.head, f.k_at.position, s.keys, i % panels,
                         s.channels, to);
        pack_keys_down(f.v + batch * f.v_at.batch + group * f.v_at.head, f.v_at.position, s.keys, i % panels, s.values,
                       deep, to + of_keys);
      }
#pragma omp for schedule(dynamic)
      for (int64_t i = 0; i < some * tiles; ++i) {
        const int64_t own = i % some, begin = (tiles - 1 - i / some) * kTileLanes;  // those with most keys come first
        const int64_t pair = first + own, count = std::min<int64_t>(kTileLanes, s.rows() - begin);
        const Tile tile(s, begin, count);
        const float* const keys = packed.get() + own * (of_keys + of_values);
        by_vectors(count, [&](auto vectors) {
          attend<decltype(vectors)::value>(f, pair / s.groups, pair % s.groups, tile, keys, keys + of_keys, deep,
                                           queries.get(), scores.get(), probabilities.get(), results.get());
        });
      }
    }
  }
}

}  // namespace te_models
using namespace te_models;

// sizes: see `Sizes`; strides: of q, k, v, out and logsumexp: see
// `Strides`
extern "C" void te_flash_forward(const X* q, const X* k, const X* v, X* out, float* logsumexp, const int64_t* sizes,
                                 const int64_t* strides, float scale, float softcap, int threads) {
  Forward f;
  std::memcpy(&f.s, sizes, sizeof(Sizes));
  std::memcpy(&f.q_at, strides, 5 * sizeof(Strides));
  f.q = q, f.k = k, f.v = v, f.out = out, f.logsumexp = logsumexp;
  f.scale = Scale(scale, softcap);
  forward(f, threads);
}
