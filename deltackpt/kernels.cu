// CUDA kernels: the same columns and fingerprints as kernels.py, bit for bit. Compiled at run time by NVRTC.
//
// A row is a run of elements of one tensor that lies in one group; a tile is 8,192 elements of a row, the last one
// shorter. Tables: per tile its row and its number in the row; per row an address, its elements, and the element of
// its tensor at which it begins. One launch serves any number of tensors.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int TILE = 8192;
constexpr int THREADS = 256;
constexpr int SPARSE = TILE / 4;  // most changes of a sparse tile
constexpr u16 DENSE = 0xFFFF;

template <int W> struct Element;
template <> struct Element<1> { typedef u8 type; };
template <> struct Element<2> { typedef u16 type; };
template <> struct Element<4> { typedef u32 type; };
template <> struct Element<8> { typedef u64 type; };

__device__ __forceinline__ u64 key(u64 word) {
  u64 z = word + 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return (z ^ (z >> 31)) | 1;
}

// What turning `before` into `after` adds to the fingerprint; both zero-extended before the difference.
template <int W> __device__ __forceinline__ u64 change(u64 element, u64 before, u64 after) {
  if (W == 8) {
    u64 low = (after & 0xFFFFFFFFull) - (before & 0xFFFFFFFFull), high = (after >> 32) - (before >> 32);
    return low * key(2 * element) + high * key(2 * element + 1);
  }
  u64 offset = element * W;
  return ((after - before) << (8 * (offset & 3))) * key(offset >> 2);
}

// Loads and stores at any alignment; the test is the same for a whole block.
template <int W> __device__ __forceinline__ u64 load(const u8* at) {
  typedef typename Element<W>::type T;
  if ((u64)at % W == 0) return *(const T*)at;
  u64 value = 0;
  for (int i = 0; i < W; i++) value |= (u64)at[i] << (8 * i);
  return value;
}

template <int W> __device__ __forceinline__ void store(u8* at, u64 value) {
  typedef typename Element<W>::type T;
  if ((u64)at % W == 0) { *(T*)at = (T)value; return; }
  for (int i = 0; i < W; i++) at[i] = (u8)(value >> (8 * i));
}

template <typename T> __device__ __forceinline__ T warp_sum(T value) {
  for (int o = 16; o; o >>= 1) value += __shfl_xor_sync(~0u, value, o);
  return value;
}

struct Rows {
  const u32 *tile_row, *tile_index;  // per tile
  const u64 *count, *start;          // per row
};

// ---------------------------------------------------------------- extract

// Planes of one window: gap.0, gap.1, value.0 .. at strides of `room`, dense.0 .. at strides of `dense_room`.
struct Planes {
  u8 *sparse, *dense;
  u64 room, dense_room;
};

// One block a tile. Tiles take their place in the planes as they come (cursor: sparse changes and dense elements taken);
// `compact` puts them in order. Waiting for the tiles before would leave the memory idle.
template <int W>
__device__ void extract(Rows rows, const u64* old_at, const u64* new_at, u32 first_tile, u64* cursor, u16* counts,
                        u32* place, Planes planes, u64* fp, u64* changed) {
  typedef typename Element<W>::type T;
  // A warp owns an eighth of the tile and walks it in rounds of 32 vectors, so that order needs one barrier only.
  constexpr int WARPS = THREADS / 32, PER = 16 / W, ROUNDS = 2 * W;
  constexpr int FIELDS = ROUNDS < 8 ? ROUNDS : 8, BITS = 64 / FIELDS, PACKS = ROUNDS / FIELDS;
  __shared__ u16 position[SPARSE];
  __shared__ T before[SPARSE], after[SPARSE];
  __shared__ int warp_count[WARPS];
  __shared__ u64 warp_fp[WARPS], taken;
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  u32 local = blockIdx.x, tile = first_tile + local, row = rows.tile_row[tile];
  u64 first = (u64)rows.tile_index[tile] * TILE, left = rows.count[row] - first;
  int length = left < TILE ? (int)left : TILE;
  const u8 *a = (const u8*)old_at[row] + first * W, *b = (const u8*)new_at[row] + first * W;
  u64 element = rows.start[row] + first;
  bool aligned = ((u64)a | (u64)b) % 16 == 0;
  int begin = warp * (TILE / WARPS) + lane * PER;  // first element of round 0; rounds are 32 * PER apart

  uint4 x[ROUNDS], y[ROUNDS];
  #pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    int e = begin + r * 32 * PER;
    x[r] = y[r] = make_uint4(0, 0, 0, 0);
    if (aligned && e + PER <= length) {
      x[r] = __ldcs((const uint4*)(a + e * W));
      y[r] = __ldcs((const uint4*)(b + e * W));
    } else {
      #pragma unroll
      for (int i = 0; i < PER; i++)
        if (e + i < length) {
          ((T*)&x[r])[i] = (T)load<W>(a + (e + i) * W);
          ((T*)&y[r])[i] = (T)load<W>(b + (e + i) * W);
        }
    }
  }
  u32 differs = 0;  // a bit for each element of this lane, in order: PER * ROUNDS is 32 for every width
  #pragma unroll
  for (int r = 0; r < ROUNDS; r++) {
    if (W <= 2) {
      const u32 *p = (const u32*)&x[r], *q = (const u32*)&y[r];
      #pragma unroll
      for (int i = 0; i < 4; i++) {  // 4 bytes, or 2 halves, by one comparison and a gather of its bits
        u32 bits = W == 1 ? ((__vcmpne4(p[i], q[i]) & 0x01010101) * 0x01020408) >> 24 & 15 : __vcmpne2(p[i], q[i]);
        if (W == 2) bits = (bits & 1) | (bits >> 30 & 2);
        differs |= bits << (r * PER + i * (4 / W));
      }
    } else {
      const T *p = (const T*)&x[r], *q = (const T*)&y[r];
      #pragma unroll
      for (int i = 0; i < PER; i++) differs |= (u32)(p[i] != q[i]) << (r * PER + i);
    }
  }
  constexpr u32 ROUND = W == 1 ? 0xFFFF : (1u << PER) - 1;
  // Changes before this lane, for all rounds at once: one field of a word each.
  u64 mine[PACKS], upto[PACKS];
  #pragma unroll
  for (int k = 0; k < PACKS; k++) {
    mine[k] = 0;
    #pragma unroll
    for (int f = 0; f < FIELDS; f++)
      mine[k] += (u64)__popc(differs >> ((k * FIELDS + f) * PER) & ROUND) << (f * BITS % 64);
    upto[k] = mine[k];
    #pragma unroll
    for (int o = 1; o < 32; o <<= 1) {
      u64 up = __shfl_up_sync(~0u, upto[k], o);
      if (lane >= o) upto[k] += up;
    }
  }
  constexpr u64 FIELD = ~0ull >> (64 - BITS);
  u64 round_total[PACKS];
  int count = 0;
  #pragma unroll
  for (int k = 0; k < PACKS; k++) {
    round_total[k] = __shfl_sync(~0u, upto[k], 31);
    #pragma unroll
    for (int f = 0; f < FIELDS; f++) count += (int)(round_total[k] >> (f * BITS % 64) & FIELD);
  }
  if (lane == 0) warp_count[warp] = count;
  __syncthreads();
  int at_warp = 0, done = 0;
  #pragma unroll
  for (int k = 0; k < WARPS; k++) { if (k == warp) at_warp = done; done += warp_count[k]; }
  bool dense = 4 * done > length;
  u64 sum = 0;
  if (done && !dense) {
    #pragma unroll
    for (int r = 0; r < ROUNDS; r++) {
      int shift = r % FIELDS * BITS % 64;
      int at = at_warp + (int)((upto[r / FIELDS] - mine[r / FIELDS]) >> shift & FIELD);
      at_warp += (int)(round_total[r / FIELDS] >> shift & FIELD);
      u32 here = differs >> (r * PER) & ROUND;
      if (here) {
        const T *p = (const T*)&x[r], *q = (const T*)&y[r];
        #pragma unroll
        for (int i = 0; i < PER; i++)
          if (here >> i & 1) {
            position[at] = (u16)(begin + r * 32 * PER + i);
            before[at] = p[i];
            after[at] = q[i];
            at++;
          }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < done; i += THREADS) sum += change<W>(element + position[i], before[i], after[i]);
  } else if (dense) {
    for (int e = threadIdx.x; e < length; e += THREADS) sum += change<W>(element + e, load<W>(a + e * W), load<W>(b + e * W));
  }
  if (done) {
    sum = warp_sum(sum);
    if (lane == 0) warp_fp[warp] = sum;
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    if (done) {
      u64 total = 0;
      for (int k = 0; k < WARPS; k++) total += warp_fp[k];
      atomicAdd(fp + row, total);
      atomicAdd(changed + row, (u64)done);
      taken = dense ? atomicAdd(cursor + 1, (u64)length) : atomicAdd(cursor, (u64)done);
      place[local] = (u32)taken;
    }
    counts[local] = dense ? DENSE : (u16)done;
  }
  if (done == 0) return;
  __syncthreads();
  u64 to = taken;
  if (dense) {
    if (to + length > planes.dense_room) return;  // the caller sees the sums, makes room and comes again
    for (int i = threadIdx.x; i < length * W; i += THREADS)
      planes.dense[i % W * planes.dense_room + to + i / W] = a[i] ^ b[i];
    return;
  }
  if (to + done > planes.room) return;
  for (int i = threadIdx.x; i < done; i += THREADS) {
    u32 gap = i ? position[i] - position[i - 1] - 1 : position[0];
    planes.sparse[to + i] = (u8)gap;
    planes.sparse[planes.room + to + i] = (u8)(gap >> 8);
    u64 v = before[i] ^ after[i];
    #pragma unroll
    for (int j = 0; j < W; j++) planes.sparse[(2 + j) * planes.room + to + i] = (u8)(v >> (8 * j));
  }
}

#define ROWS const u32 *tile_row, const u32 *tile_index, const u64 *count, const u64 *start
#define EXTRACT(W, BLOCKS)                                                                                           \
  extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) extract_##W(                                                 \
      ROWS, const u64* old_at, const u64* new_at, u32 first_tile, u64* cursor, u16* counts, u32* place, u8* sparse,  \
      u8* dense, u64 room, u64 dense_room, u64* fp, u64* changed) {                                                  \
    extract<W>({tile_row, tile_index, count, start}, old_at, new_at, first_tile, cursor, counts, place,              \
               {sparse, dense, room, dense_room}, fp, changed);                                                      \
  }
EXTRACT(1, 5)
EXTRACT(2, 4)
EXTRACT(4, 3)
EXTRACT(8, 1)

// One warp a tile: from where it was taken down to its place in order. offset: see Group.
extern "C" __global__ void __launch_bounds__(THREADS)
compact(u32 tiles, u32 width, const u16* counts, const u32* place, const u64* offset, const u8* sparse, const u8* dense,
        u64 room, u64 dense_room, u8* sparse_out, u8* dense_out, u64 k_out, u64 d_out, ROWS, u32 first_tile) {
  u32 t = (u32)(((u64)blockIdx.x * THREADS + threadIdx.x) >> 5);
  int lane = threadIdx.x & 31;
  if (t >= tiles) return;
  u16 n = counts[t];
  if (n == 0) return;
  u64 at = offset[t], from = place[t];
  if (n == DENSE) {
    u32 tile = first_tile + t;
    u64 left = count[tile_row[tile]] - (u64)tile_index[tile] * TILE;
    u32 length = left < TILE ? (u32)left : TILE;
    for (u32 j = 0; j < width; j++)
      for (u32 i = lane; i < length; i += 32) dense_out[j * d_out + (at >> 32) + i] = dense[j * dense_room + from + i];
    return;
  }
  at &= 0xFFFFFFFFull;
  for (u32 j = 0; j < 2 + width; j++)
    for (u32 i = lane; i < n; i += 32) sparse_out[j * k_out + at + i] = sparse[j * room + from + i];
}

// ---------------------------------------------------------------- stage

// Columns of one group in device memory, planes at strides of k and d. offset: per tile, sparse changes (low 32 bits) and
// dense elements before it.
struct Group {
  const u16* counts;
  const u8 *gaps, *values, *dense;
  u64* offset;
  u64 k, d;
  u32 first_tile, tiles, width, before;  // before: tiles of the groups before it in this launch
};

// One block a group: prefix sums of its counts.
extern "C" __global__ void scan(ROWS, const Group* groups) {
  Rows rows = {tile_row, tile_index, count, start};
  __shared__ u64 warp_total[32], carry;
  Group g = groups[blockIdx.x];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
  if (threadIdx.x == 0) carry = 0;
  __syncthreads();
  for (u32 base = 0; base < g.tiles; base += blockDim.x) {
    u32 t = base + threadIdx.x;
    u64 mine = 0;
    if (t < g.tiles) {
      u16 c = g.counts[t];
      if (c == DENSE) {
        u32 tile = g.first_tile + t;
        u64 left = rows.count[rows.tile_row[tile]] - (u64)rows.tile_index[tile] * TILE;
        mine = (left < TILE ? left : TILE) << 32;
      } else mine = c;
    }
    u64 s = mine;
    for (int o = 1; o < 32; o <<= 1) { u64 up = __shfl_up_sync(~0u, s, o); if (lane >= o) s += up; }
    if (lane == 31) warp_total[warp] = s;
    __syncthreads();
    u64 before = carry;
    for (int k = 0; k < warp; k++) before += warp_total[k];
    if (t < g.tiles) g.offset[t] = before + s - mine;
    __syncthreads();
    if (threadIdx.x == 0) for (int k = 0; k < warps; k++) carry += warp_total[k];
    __syncthreads();
  }
}

__device__ __forceinline__ const Group* find(const Group* groups, int n, u32 at) {
  int low = 0, high = n - 1;
  while (low < high) {
    int middle = (low + high + 1) >> 1;
    if (groups[middle].before <= at) low = middle; else high = middle - 1;
  }
  return groups + low;
}

// One warp a tile: its last position, which is the largest, must be inside. bad: a tile of the launch where it is not.
extern "C" __global__ void __launch_bounds__(THREADS)
check(ROWS, const Group* groups, u32 n_groups, u32 tiles, int* bad) {
  u32 at = (u32)(((u64)blockIdx.x * THREADS + threadIdx.x) >> 5);
  int lane = threadIdx.x & 31;
  if (at >= tiles) return;
  const Group& g = *find(groups, n_groups, at);
  u32 t = at - g.before, tile = g.first_tile + t;
  u16 n = g.counts[t];
  if (n == 0 || n == DENSE) return;
  u64 left = count[tile_row[tile]] - (u64)tile_index[tile] * TILE, k = g.offset[t] & 0xFFFFFFFFull;
  u32 sum = 0;
  for (int i = lane; i < n; i += 32) sum += 1 + g.gaps[k + i] + (g.gaps[g.k + k + i] << 8);
  sum = warp_sum(sum);
  if (lane == 0 && sum > (left < TILE ? left : TILE)) atomicMax(bad, (int)at);
}

// ---------------------------------------------------------------- apply

// One warp a tile: a prefix sum of the gaps gives the positions.
template <int W>
__device__ u64 apply_tile(const Group& g, u32 t, u16 n, u8* at, u64 element, int length, int lane) {
  u64 sum = 0, offset = g.offset[t];
  if (n == DENSE) {
    const u8* plane = g.dense + (offset >> 32);
    for (int e = lane; e < length; e += 32) {
      u64 x = 0;
      #pragma unroll
      for (int j = 0; j < W; j++) x |= (u64)plane[j * g.d + e] << (8 * j);
      u64 before = load<W>(at + (u64)e * W);
      store<W>(at + (u64)e * W, before ^ x);
      sum += change<W>(element + e, before, before ^ x);
    }
    return sum;
  }
  u64 k = offset & 0xFFFFFFFFull;
  int last = -1;
  for (int s = 0; s < n; s += 32) {
    int i = s + lane, step = 0;
    u64 x = 0;
    if (i < n) {
      step = (g.gaps[k + i] | (g.gaps[g.k + k + i] << 8)) + 1;
      #pragma unroll
      for (int j = 0; j < W; j++) x |= (u64)g.values[j * g.k + k + i] << (8 * j);
    }
    int p = step;
    #pragma unroll
    for (int o = 1; o < 32; o <<= 1) { int up = __shfl_up_sync(~0u, p, o); if (lane >= o) p += up; }
    if (i < n) {
      u64 e = (u64)(last + p);
      u64 before = load<W>(at + e * W);
      store<W>(at + e * W, before ^ x);
      sum += change<W>(element + e, before, before ^ x);
    }
    last += __shfl_sync(~0u, p, 31);
  }
  return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS)
apply(ROWS, const u64* row_at, const Group* groups, u32 n_groups, u32 tiles, u64* fp) {
  Rows rows = {tile_row, tile_index, count, start};
  u32 at = (u32)(((u64)blockIdx.x * THREADS + threadIdx.x) >> 5);
  int lane = threadIdx.x & 31;
  if (at >= tiles) return;
  const Group& g = *find(groups, n_groups, at);
  u32 t = at - g.before;
  u16 n = g.counts[t];
  if (n == 0) return;
  u32 tile = g.first_tile + t, row = rows.tile_row[tile];
  u64 first = (u64)rows.tile_index[tile] * TILE, left = rows.count[row] - first;
  int length = left < TILE ? (int)left : TILE;
  u8* memory = (u8*)row_at[row] + first * g.width;
  u64 element = rows.start[row] + first, sum = 0;
  switch (g.width) {
    case 1: sum = apply_tile<1>(g, t, n, memory, element, length, lane); break;
    case 2: sum = apply_tile<2>(g, t, n, memory, element, length, lane); break;
    case 4: sum = apply_tile<4>(g, t, n, memory, element, length, lane); break;
    case 8: sum = apply_tile<8>(g, t, n, memory, element, length, lane); break;
  }
  sum = warp_sum(sum);
  if (lane == 0) atomicAdd(fp + row, sum);
}

// ---------------------------------------------------------------- fingerprint

// One block a tile: the sum over its words, the last one zero-padded.
extern "C" __global__ void __launch_bounds__(THREADS)
fingerprint(ROWS, const u64* row_at, const u8* row_width, u32 tiles, u64* fp) {
  Rows rows = {tile_row, tile_index, count, start};
  __shared__ u64 warp_total[THREADS / 32];
  u32 tile = blockIdx.x;
  u32 row = rows.tile_row[tile];
  u64 width = row_width[row], first = (u64)rows.tile_index[tile] * TILE, left = rows.count[row] - first;
  u64 nbytes = (left < TILE ? left : TILE) * width;
  const u8* at = (const u8*)row_at[row] + first * width;
  u64 word = (rows.start[row] + first) * width / 4, sum = 0;
  u32 words = (u32)(nbytes / 4);
  if ((u64)at % 16 == 0) {
    for (u32 i = threadIdx.x; i < words / 4; i += THREADS) {
      uint4 v = __ldcs((const uint4*)at + i);
      u64 w = word + 4 * (u64)i;
      sum += v.x * key(w) + v.y * key(w + 1) + v.z * key(w + 2) + v.w * key(w + 3);
    }
    for (u32 i = words / 4 * 4 + threadIdx.x; i < words; i += THREADS) sum += load<4>(at + 4 * i) * key(word + i);
  } else {
    for (u32 i = threadIdx.x; i < words; i += THREADS) sum += load<4>(at + 4 * i) * key(word + i);
  }
  if (threadIdx.x == 0) {
    u64 rest = 0;
    for (u64 i = 4 * (u64)words; i < nbytes; i++) rest |= (u64)at[i] << (8 * (i & 3));
    sum += rest * key(word + words);
  }
  sum = warp_sum(sum);
  if ((threadIdx.x & 31) == 0) warp_total[threadIdx.x >> 5] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    u64 total = 0;
    for (int k = 0; k < THREADS / 32; k++) total += warp_total[k];
    atomicAdd(fp + row, total);
  }
}
