# SPDX-License-Identifier: Apache-2.0
"""Faults in the kernels for CUDA, which tests/simt runs on the processor."""

from mutations.change import In

LAYERS = "tests/simt/test_simt_layers.py"
SOLVERS = "tests/simt/test_simt_solvers.py"
SLICES = "tests/simt/test_simt_slices.py"
HOPPER = "tests/simt/test_simt_wgmma.py"
OUTPUTS = "tests/simt/test_simt_outputs.py"
DESCENT = "tests/simt/test_simt_common_descent.py"

combine = In("csrc/cuda/layer_combine.cu", f"{LAYERS} {OUTPUTS} -k combin", "layer_combine")
dots = In("csrc/cuda/kernels/row_products.cuh", f"{LAYERS} -k 'dots or layers or large'", "layer_dots")
squares = In("csrc/cuda/kernels/row_products.cuh", f"{LAYERS} -k 'dots or layers or large or squares'", "layer_squares")
divided_dots = In("csrc/cuda/kernels/row_products.cuh", f"{SLICES} -k dots", "layer_dots")
track = In("csrc/cuda/puc_track.cu", f"{SOLVERS} {OUTPUTS} -k 'puc or tracking'", "puc_track")
means = In("csrc/cuda/puc_combine.cu", f"{SOLVERS} -k puc", "puc_combine")
project = In("csrc/cuda/project_conflicts.cu", f"{SOLVERS} -k project", "project_conflicts")
solve = In("csrc/cuda/min_norm.cu", f"{SOLVERS} -k min_norm", "min_norm")
nearest = In("csrc/cuda/kernels/nearest_point.cuh", f"{SOLVERS} -k min_norm", "min_norm")
descend = In("csrc/cuda/common_descent.cu", DESCENT, "common_descent")
active = In("csrc/cuda/kernels/active_set.cuh", f"{SOLVERS} -k min_norm", "min_norm")
columns = In("csrc/cuda/device/columns.cuh", f"{LAYERS} {OUTPUTS} -k 'combin or beyond'", "layer_combine")
sums = In("csrc/cuda/device/columns.cuh", f"{LAYERS} -k dots", "layer_dots")
runs = In("csrc/cuda/device/columns.cuh", f"{LAYERS} -k gram", "layer_gram")
table = In("csrc/cuda/device/layers.cu", f"{LAYERS} -k layers", "layers")
brought = In("csrc/cuda/device/copy_in.cu", f"{OUTPUTS} -k host", "copy_in")
layers = In("csrc/cuda/device/layers.cuh", LAYERS, "layer_gram")
partials = In("csrc/cuda/kernels/partials.cuh", f"{LAYERS} {SLICES} {OUTPUTS}", "layer_gram")
direct = In("csrc/cuda/kernels/gram_direct.cuh", f"{LAYERS} {SLICES} {OUTPUTS}", "layer_gram")
crossed = In("csrc/cuda/kernels/gram_direct.cuh", f"{LAYERS} {OUTPUTS} -k 'cross or again'", "layer_cross_gram")
tiled = In("csrc/cuda/kernels/products_tiled.cuh", f"{LAYERS} {OUTPUTS}", "layer_cross_gram")
mma = In("csrc/cuda/kernels/products_mma.cuh", f"{LAYERS} {OUTPUTS}", "layer_gram")
hopper = In("csrc/cuda/kernels/products_wgmma.cuh", HOPPER, "layer_gram")
hopper_cross = In("csrc/cuda/kernels/products_wgmma.cuh", f"{HOPPER} -k 'cross or which_rows'", "layer_cross_gram")
projected = In("csrc/cuda/project_conflicts.cu", f"{SOLVERS} -k 'project and 257'", "project_conflicts")
searched = In("csrc/cuda/kernels/active_set.cuh", f"{SOLVERS} -k wherever", "min_norm")
asked = In("csrc/cuda/device/device.cuh", f"{SOLVERS} -k 'as_far_as'", "min_norm")
direction = In("csrc/cuda/kernels/nearest_point.cuh", DESCENT, "common_descent")
again = In("csrc/cuda/kernels/partials.cuh", f"{OUTPUTS} -k summed_again", "layer_gram")
tiled_edge = In("csrc/cuda/kernels/partials.cuh", f"{LAYERS} -k cross_gram", "layer_cross_gram")
trimmed = In("csrc/cuda/trimmed_mean.cu", "tests/simt/test_simt_trimmed_mean.py", "trimmed_mean")
swizzled = In("csrc/cuda/device/warpgroup.cuh", HOPPER, "layer_gram")
BARRIER, WARP_BARRIER = "__syncthreads();", "__syncwarp();"

MUTATIONS = [
    combine("coefficients of the rows for the others", "h, own« + m→», column"),
    combine("coefficients of a layer are too few", "«kCross ? m + h : →»m)"),
    combine("the last of a group of rows does not count", "r < kCombineRows «→- 1 »&& r < m - i; ++r) any"),
    combine("skipped rows are multiplied by zero", "«if (kSkip && weight == 0.0) continue;→»"),
    combine("the width of the rows for the others", "item, «other_width→width», sum"),
    combine("the start is not added", "«kAdd ? sum[v] + widen<double>(result[v]) : →»sum[v]"),
    dots("sums of earlier blocks are lost", "total[r] «+→»= sums[r]"),
    dots("the last warp's sums are lost", "w < kRowThreads / kWarp«→ - 1»; ++w) sum"),
    divided_dots("a second block starts by its own address", "aligned_start(«rows→own», item.start)"),
    squares("columns by their address", "«item.start / kRun<T> * kRun<T>→aligned_start(own, item.start)»"),
    dots("the width of the rows for the step", "item.stop, «step_width→width», s[k])"),
    dots("a group has a row too few", "«(m + groups - 1)→m» / groups"),
    dots("two lanes send what they keep", "upper ? x«[r] : x[r + kRows / 2]→[r + kRows / 2] : x[r]»"),
    dots("rows of the first group for all", "rows« + first_row * stride→»"),
    track("a word of two layers keeps the last one's bits", "words[first / 32] «|→»= bits"),
    track("the new sign counts as a past one", "before «→+ 1 »: bounds.participations - before) >="),
    track("the width of the row for the counts", "from, to, «count_width→width», own)"),
    track("the threshold is missed by one", ">«=→» bounds.threshold;"),
    track("the first spans of a layer alone", "span += «kWarps * kTrackSpans→1 << 20»"),
    track("what is not kept counts", "«kept ? value : Real{0}→value»"),
    track("bits of other layers", "«first + v < from || first + v >= to ? ~(1u << v) : →»~0u"),
    track("a chunk of several layers is one layer's", "whole« && table.offset(layer + 1) >= start + size→»"),
    track("a thread does not come back for more", "«if (span * kSpan<T> >= size) →»break;"),
    track("the next pair of spans begins too early", "span += kWarps« * Columns<T, Count>::kSpans→»"),
    means("bits of the last row alone", "any «|→»= bits"),
    means("the last run of columns is not written", "rows.columns« + kRun<T> - 1→»"),
    means("weights of what is not kept", "«kept ? own[r] : 0.0→own[r]»"),
    means("rows of the first group for all", "rows« + i * stride→», stride, m - i, column, 0"),
    combine("the width of the rows for the output", "item.stop, «out_width→width», out)"),
    combine(
        "items in the order in which layer_gram reads them",
        "«gridDim.x - 1 - →»blockIdx.x",
        unseen="only the time tells, on a GPU",
    ),
    project("rows of the first block for all", "«static_cast<int>(blockIdx.x % blocks) * kWarps + →»warp"),
    project("conflicts of NaN do not count", "«dot >= 0.0→!(dot < 0.0)» || square <= 0.0"),
    project("zero rows are divided by", "dot >= 0.0« || square <= 0.0→»"),
    project("an order beyond the rows is skipped", "if (k == j« || !known→») coeff[k] -= share;"),
    solve("the gap is not relative", "excess« / power.mean→»"),
    nearest("the first ridge is used again", "«attempt == 0 ? kFirstRidge : kNextRidge * ridge→kFirstRidge»"),
    nearest("the last attempt counts", "«attempt == 0 || excess < best→true»"),
    solve(
        "the matrix stays as asymmetric as it is",
        "«0.5 * ldexp(gram[e], power.exponent) + 0.5 * ldexp(gram[j * k + i], power.exponent)→"
        "ldexp(gram[e], power.exponent)»",
    ),
    descend("the upper median", "«(count - 1)→count» / 2"),
    descend("lengths of 0 count for the median", "«norm[j] != 0.0 && →»(norm[j] < norm[i]"),
    descend("equal lengths share a place", "«(norm[j] == norm[i] && j < i)→false»"),
    descend("the mean length is over all rows", "/ «fmax(count, 1.0)→online»"),
    descend("remembered rows are in the mean", "sum_of(«online→k», [&](int i) { return norm[i] > least ? norm[i]"),
    descend("the fair row is not made as long", "«mean / length→1.0» : 0.0;"),
    descend("a short fair row is stretched", "length > «descent.zero_direction * size * mean→0.0» ?"),
    descend("remembered rows are in the fair row", "weights «&& i < online →»?"),
    descend("the fair row is in another place", "«hull[some * rows + own] = cross;→»"),
    descend("the corner is not scaled", "hull[some * rows + some] = «ldexp(corner, exponent)→corner»"),
    descend("the matrix stays as asymmetric as it is", "«0.5 * gram[e] + 0.5 * gram[j * k + i]→gram[e]»"),
    descend("overflow goes unseen", "«return __syncthreads_or(bad) ? -1 :→__syncthreads(); return» rows;"),
    descend(
        "remembered rows must fall, too", "for (int i = threadIdx.x; i < «online→k»; i += blockDim.x) {\n      stays"
    ),
    descend("the mean square is the sum", "* squares« / live→»"),
    descend("rounding of the row alone", "descent.rounding * norm[i]« * size→»"),
    descend("the fair row's share is lost", "«with_fair_row ? problem.lam[rows - 1] * problem.fair[i] : →»0.0"),
    descend("nothing to do counts as unsolved", "solved[matrix] = «rows == 0→false»;"),
    descend("weights that are not finite count", "«i < problem.online && !isfinite(descent.weights[i])→false»"),
    descend("factors that are not finite count", "«given && !isfinite(given[i])→false»"),
    active("the ridge is in the gap", "multiply(lam, «false→true»)"),
    active("a search goes on with the ridge of before", "«ridge = added;→»"),
    active("the border is never refined", "move.refine = «!moved && !fresh→0»;"),
    active(
        "weights do not sum to one",
        "instead < 0 ? lam[i]« / total→»",
        unseen="every move keeps the sum, up to rounding",
    ),
    sums("a part begins one early", "if (v «→+ 1 »< start || v >= stop) continue;"),
    columns(
        "the last column of a run is outside", "const bool inside = column + v >= start && column + v «→+ 1 »< stop;"
    ),
    columns("vectors of 8 bytes where 4 are aligned", "} else if (width == 4) {\n    load_vectors<«4→8»>(row"),
    columns("rows beyond the last are read", "if (r <«→=» count) {"),
    table("the last offset stays behind", "«entries→layers.count» * static_cast"),
    brought("the second part over the first", "launch_part<kLargeCopyPart>(op, from + first, left, own« + first→»"),
    brought(
        "bytes beyond the first threads are not written", "i < end«→ && i < first + blockDim.x»; i += blockDim.x) to"
    ),
    layers("an item begins before its layer", "«from > chunk ? from : →»chunk"),
    partials("the last chunk of a layer is left out", "chunk >= first && chunk «→+ 1 »< end ?"),
    partials(
        "a chunk of the layer before counts",
        "chunk «>= first && chunk →»< end ?",
        unseen="items before the first one of a layer have no columns, and add nothing",
    ),
    partials("right nodes are added to the left neighbour's place", "if (lane == «level→0») left = sum;"),
    partials("sums of too large products stay", "«if (!__syncthreads_or(bad)) →»return;"),
    partials("only what is NaN is summed again", "«isfinite→!isnan»(partial[at])) continue;"),
    partials(
        "sums go on when they are NaN",
        "«if (__ballot_sync(kFullWarp, isnan(sum)) != 0) return NAN;→»",
        unseen="only the time tells",
    ),
    direct("sums of earlier columns are lost", "totals[first + lane] «+→»= sum"),
    direct("lanes beyond the pairs are not left out", "if (first + lane < kCount«→ - 1») {"),
    crossed("the second half of the others is the first one", "tile % across * «wide→0»"),
    crossed("warps of one tile take the same columns", "first + warp / «tiles→kWarps» * kSpan"),
    crossed("a row below the last one is read", "m - row < tall ? m - row : «tall→tall + 1»"),
    crossed("the width of the rows for the others", "item.stop, «other_width→width», y)"),
    crossed("a tile has the sums of one warp", "w < «kWarps→tiles»; w += tiles"),
    tiled("one group's sums are lost", "for (int g = «1→2»; g < kGroups; ++g)"),
    tiled(
        "columns beyond the item are fetched",
        "row < side.matrix.rows« && at < item.stop→»",
        unseen="each number of a run is compared with the item's end again",
    ),
    tiled("the width of the left side for the right", "vector_width(«b→a», column)}"),
    mma("flushed sums are added again", "«    sums[k / 4][k % 4] = 0.0f;\n→»"),
    mma("the second half of the columns of a diagonal block", "column« + later→», item, right_next);\n    }"),
    mma("small parts are rounded up", "big[w] = «(big[w] + 0x1000u)→big[w]» & kTf32Bits"),
    hopper_cross("one row more than there is a kernel for", "if (rows > line.rows« →+ 1 »|| others"),
    hopper("flushed sums are added again", "«        sums[k] = 0.0f;\n→»"),
    hopper("sums of earlier columns are lost", "        totals[k] «+→»= sums[k];\n        sums"),
    hopper("a product of two small parts is left out", "factor« * (1.0f + 0x1p-11f)→»,"),
    hopper("small parts are cut off", ")« + 0x1000u→»;"),
    hopper("columns before the item count", "run.load_part(row, «start→0», stop)"),
    hopper("columns behind the item count", "run.load_part(row, start, «stop→kRun<T>»)"),
    hopper("rows below the last one are read", "«if (k * kApart < left) →»function"),
    hopper("vectors of 16 bytes where 4 are aligned", "inside« && width == 16→»"),
    hopper("half of the transpose is left out", "«0.5 * (of(y, x) + of(x, y))→of(y, x)»"),
    hopper("squares that are too large stay", "«    bad |= !isfinite(total);\n→»"),
    hopper("rows of 16 bits at odd addresses are copied", "«width < 4 || →»0 < start"),
    hopper_cross(
        "the others' small parts are not found", "«if constexpr (!kSymmetric) split_rows(others, tile, rest);→»"
    ),
    hopper_cross("the second group has the first one's rows", "kRows : «kWarpgroupRows→0»), other"),
    # In memory of the device, where threads meet without a shared array.
    descend("products are read before they are there", f"«{BARRIER}→»"),
    descend("the fair row is multiplied before it is there", f"«{BARRIER}→»", 3),
    descend("the fair row is stretched while others add it up", f"«{BARRIER}→»", 4),
    descend("places are read before they are counted", f"«{BARRIER}→»", 6),
    descend("coefficients are read before they are there", f"«{BARRIER}→»", 7),
    descend("the hull is searched before it is there", "return «__syncthreads_or(bad)→bad» ?"),
    descend("a row too many is multiplied", "threadIdx.x / kWarp; i <«→=» k;"),
    descend("remembered rows have no number in the fair row", "i < «k→online»; i += blockDim.x) fair"),
    descend("the hull has a row too little", "«(k + 1)→k» * (k + 1); }"),
    descend("the search has a row too little", "batch * search_size(k« + 1→»)"),
    direction("weights are read before they are there", f"«{BARRIER}→»"),
    solve("the matrix is searched before it is scaled", f"«{BARRIER}→»"),
    searched("a matrix is swept while its column is copied", f"«{BARRIER}→»", 2),
    searched("a move is chosen before the matrix is swept", f"«{BARRIER}→»", 3),
    projected("two lanes change the same products", "k = lane«→ & ~1»; k < m", 1),
    projected("products change while they are read", f"«{WARP_BARRIER}→»", 1),
    projected("products are read before they have changed", f"«{WARP_BARRIER}→»", 2),
    dots("blocks of other rows write the same sums", "«(first_row + e)→e» * items"),
    again("one warp's sums are waited for", "!«__syncthreads_or(bad)→__ballot_sync(kFullWarp, bad)»"),
    tiled_edge("a column of pairs beyond the last", "j >«=→» others"),
    brought("a byte beyond the last", "i <«→=» end; i += blockDim.x"),
    trimmed("a column beyond the last", "lane < lanes && first + lane <«→=» columns"),
    trimmed("rows that are missing count", "«r < m ? x[r].stored[w] : infinite<T>()→x[r].stored[w]»"),
    trimmed("NaN in a row of 16 bits is not seen", "Order<T>::«larger_or_nan→larger»("),
    # Missing barriers: before a read of what others wrote, and before a write of what others read.
    tiled("products are read before they are staged", f"«{BARRIER}→»"),
    tiled("products are staged before they are read", f"«{BARRIER}→»", 1),
    direct("a warp reads before it has written", f"«{WARP_BARRIER}→»"),
    crossed("sums are read before warps have written them", f"«{BARRIER}→»", 1),
    dots("warps are not waited for", f"«{BARRIER}→»"),
    mma("products are read before they are staged", f"«{BARRIER}→»"),
    hopper("products are read before they are copied", f"«{BARRIER}→»"),
    hopper("copied while read", "at« == 0 ? kEnd - kTile : at - kTile→»"),
    hopper("copies are not waited for", "COPY_WAIT(kDeep - «2→1»)", 1),
    hopper("tensor cores are not told", "«FENCE_TENSOR_CORES();→»", 1),
    hopper("products are not waited for", "«WGMMA_WAIT(chain);→»"),
    hopper("totals are read before they are there", f"«{BARRIER}→»", 2),
    track("sums are overwritten", f"«{BARRIER}→»", 2),
    # Wrong indices, outputs that nobody writes, a warp of which not all lanes take part.
    layers("the last item of a layer", "<«=→» value"),
    tiled("neighbouring rows", "load_shared(left, (y «+ i * kApart→* kEach + i»)"),
    mma("registers of other rows", "{others.big«[half], others.big[half + 2]→[0], others.big[1]»}"),
    mma("small parts are dropped", "«mma<T>(next, rows.big, small, next);→»"),
    swizzled("runs in their own places", "«(column ^ row % 8 * 4)→column»"),
    swizzled("patterns of rows too near", "«kPatternBytes→512» >> 4"),
    hopper("the same columns twice", "«half * 2 * kStepOn→0»"),
    hopper("small parts are dropped", "«small_part(big[k], 2.0f)→0»"),
    hopper("a tile anywhere", "«(kPatternBytes - SHARED_ADDRESS(held_rows) % kPatternBytes) % kPatternBytes / →»4"),
    means("bits of the wrong column", "keep + «column→(column + 4)» / 32"),
    partials("of the last chunks only", "for (; «group >> level & 1→false»;"),
    columns("the last columns", "column + v «→+ 1 »< stop) row["),
    partials("the upper triangle", "if («kPairs == Pairs::symmetric→false») matrix["),
    track("half a warp's bits", "__shfl_xor_sync(«kFullWarp→0xffffu»"),
    # Shared memory beyond 48 KB.
    asked("no kernel asks for more", "if («bytes > 0→false») error"),
    asked("all devices have as much as any", "«known && bytes > kDeclaredShared→false»"),
    asked("kernels have no arrays of their own", "kDeclaredShared)« - kDeclaredBytes→»"),
]
