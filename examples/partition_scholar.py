# SPDX-License-Identifier: Apache-2.0
"""Generates papers, authors and venues, and partitions them for `distdgl_rgcn.py` with DGL's `partition_graph`.

Papers cite, authors write and venues publish mostly within one field, which is what is to be predicted. Only papers
have features, weak ones.
"""

import argparse

import dgl
import torch


def make_graph(num_papers, num_fields, seed):
    torch.manual_seed(seed)
    num_authors, num_venues = num_papers * 2 // 3, num_fields * 5
    field = torch.randint(num_fields, (num_papers,))
    of_author = torch.randint(num_fields, (num_authors,))
    of_venue = torch.arange(num_venues) % num_fields

    def draw(size, fields, wanted, loyalty):
        """For each wanted field one of `size` vertices: of that field with probability `loyalty`, else any."""
        order = torch.argsort(fields)
        count = torch.bincount(fields, minlength=num_fields)
        first = count.cumsum(0) - count
        inside = order[(first[wanted] + (torch.rand(len(wanted)) * count[wanted]).long()).clamp(max=size - 1)]
        return torch.where(torch.rand(len(wanted)) < loyalty, inside, torch.randint(size, (len(wanted),)))

    papers = torch.arange(num_papers)
    citing, written = papers.repeat_interleave(6), papers.repeat_interleave(3)
    cited = draw(num_papers, field, field[citing], 0.7)
    author = draw(num_authors, of_author, field[written], 0.8)
    venue = draw(num_venues, of_venue, field, 0.6)
    g = dgl.heterograph(
        {
            ("paper", "cites", "paper"): (citing, cited),
            ("paper", "cited-by", "paper"): (cited, citing),
            ("author", "writes", "paper"): (author, written),
            ("paper", "written-by", "author"): (written, author),
            ("venue", "publishes", "paper"): (venue, papers),
            ("paper", "appears-in", "venue"): (papers, venue),
        },
        {"paper": num_papers, "author": num_authors, "venue": num_venues},
    )
    centres = torch.randn(num_fields, 16)
    g.nodes["paper"].data["feat"] = 0.5 * centres[field] + torch.randn(num_papers, 16)
    g.nodes["paper"].data["label"] = field
    share = torch.rand(num_papers)
    g.nodes["paper"].data["train_mask"] = share < 0.5
    g.nodes["paper"].data["val_mask"] = (share >= 0.5) & (share < 0.7)
    g.nodes["paper"].data["test_mask"] = share >= 0.7
    return g


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-parts", type=int, default=2)
    parser.add_argument("--out", default="scholar_parts")
    parser.add_argument("--papers", type=int, default=6000)
    parser.add_argument("--fields", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    graph = make_graph(args.papers, args.fields, args.seed)
    dgl.distributed.partition_graph(graph, "scholar", args.num_parts, args.out, num_hops=1, part_method="metis")
