// Lays out a graph with dagre, away from the thread that draws the page.
onmessage = (event) => {
  const { nodes, edges } = event.data;
  const graph = new dagre.graphlib.Graph();
  graph.setGraph({ rankdir: "TB", nodesep: 14, ranksep: 26, marginx: 8, marginy: 8 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const node of nodes) graph.setNode(String(node.id), { width: node.width, height: node.height });
  for (const [from, to] of edges) graph.setEdge(String(from), String(to));
  dagre.layout(graph);
  const { width, height } = graph.graph();
  postMessage({
    width, height,
    nodes: nodes.map((node) => ({ id: node.id, x: graph.node(String(node.id)).x, y: graph.node(String(node.id)).y })),
    edges: edges.map(([from, to]) => graph.edge(String(from), String(to)).points),
  });
};
